"""Storage backend for SGLang's HiCache, behind its host memory.

It only needs an entry in SGLang's configuration (0.5.23)::

    --enable-hierarchical-cache --hicache-mem-layout page_first --hicache-storage-backend dynamic
    --hicache-storage-backend-extra-config '{
        "backend_name": "reprise", "module_path": "reprise.sglang", "class_name": "RepriseStorage", "interface_v1": 1,
        "socket": "/run/reprise/agent.sock"}'

The options are in :class:`reprise.sglang.options.StorageOptions`.
"""

from reprise.sglang.storage import RepriseStorage

__all__ = ["RepriseStorage"]
