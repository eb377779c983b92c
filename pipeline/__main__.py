"""`python -m pipeline` is `pack`."""

from pipeline.cli import main

if __name__ == "__main__":
    main(prog_name="pack")
