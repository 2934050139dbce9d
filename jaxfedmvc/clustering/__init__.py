"""Clustering algorithms on one device, as pure functions of arrays and keys."""

from jaxfedmvc.clustering.kmeans import KMeansResult, kmeans, kmeans_plusplus, lloyd, predict

__all__ = ["KMeansResult", "kmeans", "kmeans_plusplus", "lloyd", "predict"]
