"""``python -m paceline``, for launchers: ``torchrun --nproc-per-node 2 -m paceline run``."""

from paceline.cli import main

if __name__ == "__main__":
    main()
