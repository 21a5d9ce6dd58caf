"""One module for each command of `python -m nsa_layer`; each has `main(argv) -> exit status`."""
