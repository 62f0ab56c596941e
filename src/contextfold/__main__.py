"""`python -m contextfold`: the command line, as `torchrun -m` starts it."""

from contextfold.cli import main

if __name__ == "__main__":
    main()
