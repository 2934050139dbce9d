"""DPFMPS: differentially private vertical k-means from Flajolet-Martin sketches."""

from jaxfedmvc.algorithms.dpfmps.method import dpfmps, dpfmps_p2est
from jaxfedmvc.algorithms.dpfmps.settings import DPFMPSConfig, DPFMPSP2EstConfig

__all__ = ["DPFMPSConfig", "DPFMPSP2EstConfig", "dpfmps", "dpfmps_p2est"]
