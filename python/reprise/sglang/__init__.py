"""SGLang's HiCache over Reprise: its storage behind host memory.

Name it in SGLang's configuration (0.5.23), nothing else is needed::

    --enable-hierarchical-cache --hicache-mem-layout page_first --hicache-storage-backend dynamic
    --hicache-storage-backend-extra-config '{
        "backend_name": "reprise", "module_path": "reprise.sglang", "class_name": "RepriseStorage", "interface_v1": 1,
        "socket": "/run/reprise/agent.sock"}'

What can be set is in :class:`reprise.sglang.options.StorageOptions`.
"""

from reprise.sglang.storage import RepriseStorage

__all__ = ["RepriseStorage"]
