"""FMCSC, federated end to end: `python -m experiments.fmcsc [--flagfile=...] [flags]`.

Without --dataset: the handwritten digits that ship with scikit-learn, in three views. The paper's
settings for its sets are flagfiles in experiments/fmcsc/presets. Everything else is as in
`experiments.run`.
"""

import sys

from experiments.run import main

if __name__ == "__main__":
    main(sys.argv[1:], "fmcsc", __doc__)
