"""The fields of KubeRay's RayJob that a manifest of ours may have, with their types, and a check against them.

They are those of the API `ray.io/v1`, read on 2026-11-28 from KubeRay's sources: RayJobSpec at commit f6ef3f7b, and
RayClusterSpec, HeadGroupSpec and WorkerGroupSpec at commit 3275ee09, both older than 1.5. `authOptions`, which came
with 1.5.1 (November 2025), and the mode with a sidecar are from the documentation of 1.6.2. Of a pod, it lists what our
manifests use, as the core API `v1` of Kubernetes has it. This is a summary of ours and not the CRD, and no API server
has read a manifest.
"""

from __future__ import annotations

from typing import Any

NEEDED = "!"
"""Beginning of the type of a field that must be there."""
_POD: dict[str, Any] = {
    "metadata": {"labels": "{str}", "annotations": "{str}"},
    "spec": {
        "containers": [
            {
                "name": "!str",
                "image": "str",
                "workingDir": "str",
                "resources": {"limits": "{quantity}", "requests": "{quantity}"},
                "volumeMounts": [{"name": "!str", "mountPath": "!str", "readOnly": "bool", "subPath": "str"}],
                "env": [{"name": "!str", "value": "str"}],
            }
        ],
        "volumes": [
            {
                "name": "!str",
                "emptyDir": {"medium": "str", "sizeLimit": "quantity"},
                "persistentVolumeClaim": {"claimName": "!str", "readOnly": "bool"},
                "configMap": {"name": "str"},
            }
        ],
        "restartPolicy": "str",
    },
}
_CLUSTER: dict[str, Any] = {
    "suspend": "bool",
    "managedBy": "str",
    "enableInTreeAutoscaling": "bool",
    "headServiceAnnotations": "{str}",
    "rayVersion": "str",
    "authOptions": {"mode": "disabled|token", "secretName": "str"},
    "headGroupSpec": {
        "template": _POD,
        "enableIngress": "bool",
        "rayStartParams": "{str}",
        "serviceType": "str",
    },
    "workerGroupSpecs": [
        {
            "suspend": "bool",
            "groupName": "!str",
            "replicas": "int",
            "minReplicas": "int",
            "maxReplicas": "int",
            "idleTimeoutSeconds": "int",
            "numOfHosts": "int",
            "rayStartParams": "{str}",
            "template": _POD,
        }
    ],
}
RAY_JOB: dict[str, Any] = {
    "apiVersion": "ray.io/v1",
    "kind": "RayJob",
    "metadata": {"name": "!str", "namespace": "str", "labels": "{str}"},
    "spec": {
        "activeDeadlineSeconds": "int",
        "backoffLimit": "int",
        "rayClusterSpec": _CLUSTER,
        "submitterPodTemplate": _POD,
        "metadata": "{str}",
        "clusterSelector": "{str}",
        "submitterConfig": {"backoffLimit": "int"},
        "managedBy": "str",
        "entrypoint": "str",
        "runtimeEnvYAML": "str",
        "jobId": "str",
        "submissionMode": "K8sJobMode|HTTPMode|InteractiveMode|SidecarMode",
        "entrypointResources": "str",
        "entrypointNumCpus": "number",
        "entrypointNumGpus": "number",
        "ttlSecondsAfterFinished": "int",
        "shutdownAfterJobFinishes": "bool",
        "suspend": "bool",
    },
}


def problems(value: Any, kind: Any, where: str = "") -> list[str]:
    """Return what is wrong with a part of a manifest, one sentence each."""
    if isinstance(kind, dict):
        if not isinstance(value, dict):
            return [f"{where}: got {value!r}, expected an object"]
        found = [f"{where}.{key}: there is no such field" for key in value if key not in kind]
        missing = [key for key, its in kind.items() if isinstance(its, str) and its[:1] == "!" and key not in value]
        found += [f"{where}.{key}: missing" for key in missing]
        return found + [
            line for key in value if key in kind for line in problems(value[key], kind[key], f"{where}.{key}")
        ]
    if isinstance(kind, list):
        if not isinstance(value, list):
            return [f"{where}: got {value!r}, expected a list"]
        return [line for index, item in enumerate(value) for line in problems(item, kind[0], f"{where}[{index}]")]
    kind = kind.removeprefix(NEEDED)
    if kind.startswith("{"):
        if not isinstance(value, dict):
            return [f"{where}: got {value!r}, expected an object"]
        return [line for key, item in value.items() for line in problems(item, kind[1:-1], f"{where}.{key}")]
    return [] if _fits(value, kind) else [f"{where}: got {value!r}, expected {kind}"]


def _fits(value: Any, kind: str) -> bool:
    if kind == "str":
        return isinstance(value, str)
    if kind == "bool":
        return isinstance(value, bool)
    if kind in ("int", "number"):
        return not isinstance(value, bool) and isinstance(value, int if kind == "int" else int | float)
    if kind == "quantity":
        number = str(value).rstrip("KMGTPEi")
        return isinstance(value, int | str) and number.replace(".", "", 1).isdigit()
    return value in kind.split("|")
