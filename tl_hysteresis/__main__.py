"""`python -m tl_hysteresis` is the command line."""

from tl_hysteresis.cli import main

if __name__ == "__main__":
    main()
