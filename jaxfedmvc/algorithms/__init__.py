"""The methods, and the one table of them."""

from functools import partial

from jaxfedmvc.algorithms.coreset_kmeans import (
    CoresetKMeansConfig,
    CoresetKMeansHyperparams,
    coreset_kmeans,
)
from jaxfedmvc.algorithms.distr_kmeans import (
    DistrKMeansConfig,
    DistrKMeansHyperparams,
    distr_kmeans,
)
from jaxfedmvc.algorithms.dpfmps import DPFMPSConfig, DPFMPSP2EstConfig, dpfmps, dpfmps_p2est
from jaxfedmvc.algorithms.fcuif import (
    FCUIFConfig,
    FCUIFHyperparams,
    FedDMVCConfig,
    FedDMVCHyperparams,
    fcuif,
    feddmvc,
)
from jaxfedmvc.algorithms.fedhk import (
    FedHKConfig,
    FedHKHyperparams,
    FedHKParafac2Config,
    FedHKTuckerConfig,
    PrivateFedHKConfig,
    PrivateFedHKHyperparams,
    e_fkmvc,
    fedhk_parafac2,
    fedhk_tucker,
    private_e_fkmvc,
)
from jaxfedmvc.algorithms.fedmvl import FedMVLConfig, FedMVLHyperparams, fedmvl
from jaxfedmvc.algorithms.fmcsc import FMCSCConfig, FMCSCHyperparams, fmcsc
from jaxfedmvc.algorithms.fmcsc.local import local_fmcsc
from jaxfedmvc.algorithms.label_consensus import LabelConsensusConfig, label_consensus
from jaxfedmvc.algorithms.local_kmeans import (
    LocalKMeansConfig,
    LocalKMeansHyperparams,
    local_kmeans,
)
from jaxfedmvc.algorithms.mgcd import MGCDConfig, MGCDHyperparams, mgcd
from jaxfedmvc.algorithms.pooled.cpspan import CPSPANConfig, CPSPANHyperparams, cpspan
from jaxfedmvc.algorithms.pooled.dsimvc import DSIMVCConfig, DSIMVCHyperparams, dsimvc
from jaxfedmvc.algorithms.pooled.gcfagg import GCFAggConfig, GCFAggHyperparams, gcfagg
from jaxfedmvc.algorithms.pooled.hcp_imsc import HCPIMSCConfig, HCPIMSCHyperparams, hcp_imsc
from jaxfedmvc.algorithms.pooled.imvc_cbg import IMVCCBGConfig, IMVCCBGHyperparams, imvc_cbg
from jaxfedmvc.algorithms.pooled.jpltd import JPLTDConfig, JPLTDHyperparams, jpltd
from jaxfedmvc.algorithms.pooled.lmvsc import LMVSCConfig, LMVSCHyperparams, lmvsc
from jaxfedmvc.algorithms.pooled.lsimvc import LSIMVCConfig, LSIMVCHyperparams, lsimvc
from jaxfedmvc.algorithms.pooled.mflvc import MFLVCConfig, MFLVCHyperparams, mflvc
from jaxfedmvc.algorithms.pooled.proimp import ProImpConfig, ProImpHyperparams, proimp
from jaxfedmvc.algorithms.pooled.simvc import (
    CoMVCConfig,
    CoMVCHyperparams,
    SiMVCConfig,
    SiMVCHyperparams,
    comvc,
    simvc,
)
from jaxfedmvc.algorithms.registry import Method, NoHyperparams
from jaxfedmvc.algorithms.vertcohirf import (
    LocalStep,
    VertCoHiRFConfig,
    VertCoHiRFHyperparams,
    vertcohirf,
    vertcohirf_of_steps,
)

# The secret is the key of hash functions: it hides rows in a sketch from who does not know it.
_Sketched = partial(Method, private=True, own_labels=True, shares_secret=True)

# A new method is one file and one line here.
METHODS: dict[str, Method] = {
    "comvc": Method(
        comvc, CoMVCConfig, CoMVCHyperparams, "pooled", "trosten2021", 0, complete=True
    ),
    "coreset_kmeans": Method(
        coreset_kmeans,
        CoresetKMeansConfig,
        CoresetKMeansHyperparams,
        "vertical",
        "huang2022",
        0,
        own_labels=True,
    ),
    "cpspan": Method(cpspan, CPSPANConfig, CPSPANHyperparams, "pooled", "jin2023", 0),
    "distr_kmeans": Method(
        distr_kmeans, DistrKMeansConfig, DistrKMeansHyperparams, "vertical", "ding2016", 0
    ),
    "dpfmps": _Sketched(dpfmps, DPFMPSConfig, NoHyperparams, "vertical", "li2023", 0),
    "dpfmps_p2est": _Sketched(
        dpfmps_p2est, DPFMPSP2EstConfig, NoHyperparams, "vertical", "li2023", 0
    ),
    "dsimvc": Method(dsimvc, DSIMVCConfig, DSIMVCHyperparams, "pooled", "tang2022", 0),
    "e_fkmvc": Method(e_fkmvc, FedHKConfig, FedHKHyperparams, "horizontal", "sinaga2025", 50),
    "fcuif": Method(fcuif, FCUIFConfig, FCUIFHyperparams, "vertical", "ren2024", 1),
    "feddmvc": Method(feddmvc, FedDMVCConfig, FedDMVCHyperparams, "vertical", "chen2023", 1),
    "fedhk_parafac2": Method(
        fedhk_parafac2, FedHKParafac2Config, FedHKHyperparams, "horizontal", "sinaga2025", 50
    ),
    "fedhk_tucker": Method(
        fedhk_tucker, FedHKTuckerConfig, FedHKHyperparams, "horizontal", "sinaga2025", 50
    ),
    "fedmvl": Method(fedmvl, FedMVLConfig, FedMVLHyperparams, "vertical", "huang2022efficient", 35),
    "fmcsc": Method(fmcsc, FMCSCConfig, FMCSCHyperparams, "horizontal", "chen2024", 5),
    "gcfagg": Method(
        gcfagg, GCFAggConfig, GCFAggHyperparams, "pooled", "yan2023", 0, complete=True
    ),
    "hcp_imsc": Method(hcp_imsc, HCPIMSCConfig, HCPIMSCHyperparams, "pooled", "li2022", 0),
    "imvc_cbg": Method(imvc_cbg, IMVCCBGConfig, IMVCCBGHyperparams, "pooled", "wang2022", 0),
    "jpltd": Method(jpltd, JPLTDConfig, JPLTDHyperparams, "pooled", "lv2023", 0),
    "label_consensus": Method(
        label_consensus, LabelConsensusConfig, NoHyperparams, "vertical", "fern2004", 0
    ),
    "lmvsc": Method(lmvsc, LMVSCConfig, LMVSCHyperparams, "pooled", "kang2020", 0, complete=True),
    "local_fmcsc": Method(
        local_fmcsc, FMCSCConfig, FMCSCHyperparams, "horizontal", "chen2024", 5, alone=True
    ),
    "local_kmeans": Method(
        local_kmeans, LocalKMeansConfig, LocalKMeansHyperparams, "horizontal", "", 0, alone=True
    ),
    "lsimvc": Method(lsimvc, LSIMVCConfig, LSIMVCHyperparams, "pooled", "liu2023", 0),
    "mflvc": Method(mflvc, MFLVCConfig, MFLVCHyperparams, "pooled", "xu2022", 0, complete=True),
    "mgcd": Method(mgcd, MGCDConfig, MGCDHyperparams, "vertical", "sun2025", 5),
    "private_e_fkmvc": Method(
        private_e_fkmvc,
        PrivateFedHKConfig,
        PrivateFedHKHyperparams,
        "horizontal",
        "sinaga2025",
        5,
        complete=True,
        private=True,
    ),
    "proimp": Method(proimp, ProImpConfig, ProImpHyperparams, "pooled", "li2023incomplete", 0),
    "simvc": Method(
        simvc, SiMVCConfig, SiMVCHyperparams, "pooled", "trosten2021", 0, complete=True
    ),
    "vertcohirf": Method(
        vertcohirf, VertCoHiRFConfig, VertCoHiRFHyperparams, "vertical", "belucci2026", 100
    ),
}

__all__ = [
    "METHODS",
    "CPSPANConfig",
    "CPSPANHyperparams",
    "CoMVCConfig",
    "CoMVCHyperparams",
    "CoresetKMeansConfig",
    "CoresetKMeansHyperparams",
    "DPFMPSConfig",
    "DPFMPSP2EstConfig",
    "DSIMVCConfig",
    "DSIMVCHyperparams",
    "DistrKMeansConfig",
    "DistrKMeansHyperparams",
    "FCUIFConfig",
    "FCUIFHyperparams",
    "FMCSCConfig",
    "FMCSCHyperparams",
    "FedDMVCConfig",
    "FedDMVCHyperparams",
    "FedHKConfig",
    "FedHKHyperparams",
    "FedHKParafac2Config",
    "FedHKTuckerConfig",
    "FedMVLConfig",
    "FedMVLHyperparams",
    "GCFAggConfig",
    "GCFAggHyperparams",
    "HCPIMSCConfig",
    "HCPIMSCHyperparams",
    "IMVCCBGConfig",
    "IMVCCBGHyperparams",
    "JPLTDConfig",
    "JPLTDHyperparams",
    "LMVSCConfig",
    "LMVSCHyperparams",
    "LSIMVCConfig",
    "LSIMVCHyperparams",
    "LocalKMeansConfig",
    "LocalKMeansHyperparams",
    "LocalStep",
    "MFLVCConfig",
    "MFLVCHyperparams",
    "MGCDConfig",
    "MGCDHyperparams",
    "Method",
    "NoHyperparams",
    "PrivateFedHKConfig",
    "PrivateFedHKHyperparams",
    "ProImpConfig",
    "ProImpHyperparams",
    "SiMVCConfig",
    "SiMVCHyperparams",
    "VertCoHiRFConfig",
    "VertCoHiRFHyperparams",
    "comvc",
    "coreset_kmeans",
    "cpspan",
    "distr_kmeans",
    "dpfmps",
    "dpfmps_p2est",
    "dsimvc",
    "e_fkmvc",
    "fcuif",
    "feddmvc",
    "fedhk_parafac2",
    "fedhk_tucker",
    "fedmvl",
    "fmcsc",
    "gcfagg",
    "hcp_imsc",
    "imvc_cbg",
    "jpltd",
    "label_consensus",
    "lmvsc",
    "local_fmcsc",
    "local_kmeans",
    "lsimvc",
    "mflvc",
    "mgcd",
    "private_e_fkmvc",
    "proimp",
    "simvc",
    "vertcohirf",
    "vertcohirf_of_steps",
]
