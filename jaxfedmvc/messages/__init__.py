"""What may be done to a message on its way: clip, noise, codecs, secure and robust sums.

`transforms` chains changes of messages, `clusters` keeps sums over few rows back, `codecs` has
forms for the wire, `secure` hides single messages in their sum, and `robust` bounds what each of
them does to it.
"""

from jaxfedmvc.messages import clusters, codecs, robust, secure, transforms
from jaxfedmvc.messages.clusters import min_cluster_size
from jaxfedmvc.messages.transforms import (
    Codec,
    clipped,
    coded,
    gaussian_noise,
    laplace_noise,
    nbytes,
    nearest_only,
    transformed,
)

__all__ = [
    "Codec",
    "clipped",
    "clusters",
    "codecs",
    "coded",
    "gaussian_noise",
    "laplace_noise",
    "min_cluster_size",
    "nbytes",
    "nearest_only",
    "robust",
    "secure",
    "transformed",
    "transforms",
]
