"""Clustering algorithms on one device, as pure functions of arrays and keys."""

from jaxfedmvc.clustering.dbscan import dbscan
from jaxfedmvc.clustering.kernel_kmeans import kernel_kmeans
from jaxfedmvc.clustering.kmeans import KMeansResult, kmeans, kmeans_plusplus, lloyd, predict
from jaxfedmvc.clustering.sc_srgf import sc_srgf
from jaxfedmvc.clustering.spectral import spectral

__all__ = [
    "KMeansResult",
    "dbscan",
    "kernel_kmeans",
    "kmeans",
    "kmeans_plusplus",
    "lloyd",
    "predict",
    "sc_srgf",
    "spectral",
]
