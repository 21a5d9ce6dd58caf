"""`python -m nsa_layer COMMAND`: runs the commands of nsa_tools, which nothing else in nsa_layer imports."""

import sys

from nsa_tools.commands import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
