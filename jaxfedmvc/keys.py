"""Which numbers keys are folded with, so that no two draws share a stream.

A client's key of one exchange is

    fold_in(fold_in(fold_in(fold_in(key, stage), round), phase), client id)

so that a client's randomness depends on neither chunking, nor participation, nor the order of
clients. Client ids, rounds and epochs are not negative and below 2^29, so that the large numbers
below are nobody's id.
"""

import jax
from jax.typing import ArrayLike

# Stages of a run, folded into the run's key.
INIT, SETUP, ROUND, FINISH, PARTICIPATION = range(5)

# Those that have exchanges, by the names of `FederatedAlgorithm`'s fields, in the order of a run.
STAGES = {"setup": SETUP, "round": ROUND, "finish": FINISH}

# Ids of clients are from 0 to below this.
CLIENT_IDS = 2**29

# Folded into a run's key with the number of a draw, where a stage would be: what chooses settings
# without labels draws apart from any run.
CHOICE = 2**30 + 1

# Seed of a simulation's pairwise masks; a deployment takes new secrets for every run.
MASKS = 2**30

# Folded into a phase's key, where a client's id would be: the server's own draws.
SERVER = 2**31

# Folded into the key of the server's draws: k-means of single views, beside that of all views.
VIEWS = 2**30

# Folded into a client's key of one exchange.
TRANSFORM = 2**30  # what `messages.transformed` and `messages.coded` draw

# Folded into the key of local training, where an epoch's number would be, and then with the step's
# number. Training takes a part of the split key of an exchange, never that key itself, so that this
# does not meet `TRANSFORM`, whose number is the same.
STEPS = 2**30


def of_stage(key: jax.Array, stage: ArrayLike, r: ArrayLike) -> jax.Array:
    """Returns the key of a stage in round `r`, which is 0 in the setup."""
    return jax.random.fold_in(jax.random.fold_in(key, stage), r)


def of_phase(key: jax.Array, stage: ArrayLike, r: ArrayLike, phase: ArrayLike) -> jax.Array:
    """Returns the key of an exchange."""
    return jax.random.fold_in(of_stage(key, stage, r), phase)
