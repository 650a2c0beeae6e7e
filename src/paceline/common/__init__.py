"""What all packages use: options, seeds, faults, formatting and files."""
