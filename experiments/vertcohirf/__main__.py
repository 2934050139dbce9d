"""VertCoHiRF and its vertical baselines: `python -m experiments.vertcohirf [--algorithm=...]`.

Without --dataset: two generated modalities, one for DBSCAN and one for k-means. Prints for every
iteration how many samples are active, how many clusters all agents agree on and the bits sent, and
leaves the cluster fusion hierarchy beside the usual files. Everything else is as in
`experiments.run`.
"""

import sys

from experiments.run import main

if __name__ == "__main__":
    main(sys.argv[1:], "vertcohirf", __doc__)
