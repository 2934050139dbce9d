"""MGCD, federated end to end: `python -m experiments.mgcd [--mode=robust|literal] [flags]`.

Without --dataset: Mfeat where it is found, else the handwritten digits. Everything else is as in
`experiments.run`.
"""

import sys

from experiments.run import main

if __name__ == "__main__":
    main(sys.argv[1:], "mgcd", __doc__)
