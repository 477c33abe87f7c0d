"""`python train.py <flags>` is `vime train <flags>`."""

import sys

from vime.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
