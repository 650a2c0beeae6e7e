"""What all packages use: options, seeds, faults, words and files."""
