"""What may be done to a message on its way: clip, noise, codecs, secure aggregation.

`transforms` chains changes of messages, `codecs` has forms for the wire, and `secure` hides single
messages in their sum.
"""

from jaxfedmvc.messages import codecs, secure, transforms
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
    "codecs",
    "coded",
    "gaussian_noise",
    "laplace_noise",
    "nbytes",
    "nearest_only",
    "secure",
    "transformed",
    "transforms",
]
