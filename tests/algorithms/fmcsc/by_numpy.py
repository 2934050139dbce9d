"""FMCSC's model, losses and weights in NumPy."""

import numpy as np


def np_mlp(params, x):
    layers = sorted(params["params"])
    for name in layers:
        x = x @ np.asarray(params["params"][name]["kernel"], np.float64)
        x = x + np.asarray(params["params"][name]["bias"])
        x = x if name == layers[-1] else np.maximum(x, 0)
    return x


def unit(x):
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def np_features(model, views):
    z = {v: np_mlp(ae.encoder, views[v]) for v, ae in model.autoencoders.items()}
    return {
        "z": z,
        "reconstruction": {v: np_mlp(ae.decoder, z[v]) for v, ae in model.autoencoders.items()},
        "h_views": {v: np_mlp(head, z[v]) for v, head in model.view_heads.items()},
        "h": unit(np_mlp(model.joint_head, np.concatenate([z[v] for v in sorted(z)], axis=1))),
    }


def np_reconstruction(out, views):
    return sum(np.mean((out["reconstruction"][v] - views[v]) ** 2) for v in out["z"])


def np_paper_contrast(h, h_view, tau):
    n, total = len(h), 0.0
    for i in range(n):
        s = [unit(h[i]) @ unit(h_view[j]) / tau for j in range(n)]
        total += np.log(sum(np.exp(s[j]) for j in range(n) if j != i)) - s[i]
    return total / n


def np_ntxent(h, h_view, tau):
    rows, n, total = np.concatenate([h_view, h]), len(h), 0.0
    for i in range(2 * n):
        s = rows @ rows[i] / tau
        total += np.log(sum(np.exp(s[j]) for j in range(2 * n) if j != i)) - s[(i + n) % (2 * n)]
    return total / (2 * n)


def np_model_contrast(h, h_global, z, tau):
    positive = np.exp([unit(a) @ unit(b) / tau for a, b in zip(h, h_global, strict=True)])
    negative = np.exp([unit(a) @ unit(b) / tau for a, b in zip(h, z, strict=True)])
    return -np.mean(np.log(positive / (positive + negative)))


def np_bits(a, b, n_bins=10):
    joint, _, _ = np.histogram2d(a.ravel(), b.ravel(), bins=n_bins)
    joint /= joint.sum()
    expected = joint.sum(axis=1, keepdims=True) * joint.sum(axis=0, keepdims=True)
    some = joint > 0
    return np.sum(joint[some] * np.log2(joint[some] / expected[some]))


def np_partial_bits(out, h_global):
    own = np.mean([np_bits(out["h"], z) for z in out["z"].values()])
    return np_bits(out["h"], h_global) - own
