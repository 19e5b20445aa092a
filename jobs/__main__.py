"""Start a command of megahour: `python -m jobs` is `megahour`."""

from jobs.cli.megahour import main

if __name__ == "__main__":
    main()
