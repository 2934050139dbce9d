"""DPFMPS: differentially private vertical k-means from Flajolet-Martin sketches."""

from jaxfedmvc.algorithms.dpfmps.method import dpfmps, dpfmps_p2est

__all__ = ["dpfmps", "dpfmps_p2est"]
