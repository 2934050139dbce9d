"""`python -m experiments.fedhk.study` under its former name."""

from experiments.fedhk.study import main

if __name__ == "__main__":
    main()
