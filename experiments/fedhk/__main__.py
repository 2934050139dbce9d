"""FedHK's methods: `python -m experiments.fedhk [--method=...] [--privacy=none|secagg|dp]`.

--method is e_fkmvc, tucker or parafac2, and person_* of these, where clients end with a model of
their own. --privacy=secagg hides clients' messages in sums, --privacy=dp adds noise that protects
samples (e_fkmvc only). Both are short for flags of `experiments.run`: the algorithm, --personal,
--secure_aggregation and --in_clear. Without --dataset: the handwritten digits over 8 clients.
"""

import sys
from collections.abc import Sequence
from functools import partial

from experiments import run
from experiments.lib.command import checked, value_of, without
from jaxfedmvc.algorithms.fedhk import SUMMARIES

METHODS = ("e_fkmvc", "tucker", "parafac2")
PRIVACIES = ("none", "secagg", "dp")


def translated(arguments: Sequence[str]) -> list[str]:
    """Returns the command line with --method and --privacy said in flags of `experiments.run`.

    Raises:
      ValueError: A method or a privacy that there is not, or not together.
    """
    method = value_of(arguments, "method") or ""
    privacy = value_of(arguments, "privacy") or "none"
    name = method.removeprefix("person_")
    if method and name not in METHODS:
        allowed = ", ".join([*METHODS, *(f"person_{m}" for m in METHODS)])
        raise ValueError(f"method: got {method!r}; allowed are {allowed}")
    if privacy not in PRIVACIES:
        raise ValueError(f"privacy: got {privacy!r}; allowed are {', '.join(PRIVACIES)}")
    found = []
    if method:
        found.append(f"--algorithm={name if name == 'e_fkmvc' else f'fedhk_{name}'}")
    if method != name:
        found.append("--personal=proximal")
    if privacy == "secagg":
        found += ["--secure_aggregation", f"--in_clear={SUMMARIES}"]
    if privacy == "dp":
        if method not in ("", "e_fkmvc"):
            raise ValueError(f"method: got {method} with --privacy=dp; allowed is e_fkmvc")
        found = ["--algorithm=private_e_fkmvc"]
        if value_of(arguments, "noise", "central") == "central":
            found.append("--secure_aggregation")
    return found + without(arguments, {"method", "privacy"})


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the job that the command line describes; that of this process if it is None."""
    arguments = sys.argv[1:] if arguments is None else arguments
    run.main(checked(partial(translated, arguments)), "e_fkmvc", __doc__)


if __name__ == "__main__":
    main()
