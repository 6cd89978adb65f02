"""`python -m kerneltune`."""

from kerneltune.cli import main

if __name__ == "__main__":
    main()
