"""The attack study by the name that it had; it lies in `experiments.vertcohirf.attack`."""

from experiments.vertcohirf.attack import main

if __name__ == "__main__":
    main()
