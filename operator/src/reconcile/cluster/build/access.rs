//! Additions to the agents' pods for access to raw devices.
//!
//! A privileged container has every device and capability and runs without a seccomp profile, regardless of
//! the rest of its security context. The rest is therefore omitted: the API server rejects
//! `allowPrivilegeEscalation: false` together with `privileged`, and dropped capabilities would not be
//! dropped.
//!
//! Modes for GPUs and RDMA are rejected before ([`crate::reconcile::cluster::validate`]).

use reprise_crds::KVCacheCluster;
use reprise_crds::cluster::{DeviceAccess, DeviceAccessMode};
use serde_json::{Value, json};

use crate::reconcile::cluster::inputs::AgentConfigInputs;

/// Access of the agents' pods to raw devices: that of the cluster if it has pools of raw devices.
pub(super) fn of<'a>(
    cluster: &'a KVCacheCluster,
    agent_config: &AgentConfigInputs,
) -> Option<&'a DeviceAccess> {
    agent_config.raw_pools().next().map(|_| &cluster.spec.agents.device_access)
}

/// Whether agents may drive NVMe controllers themselves, and grant queue pairs of them to engines.
pub(super) fn drives_controllers(access: Option<&DeviceAccess>) -> bool {
    access.is_some_and(|access| access.mode == DeviceAccessMode::Privileged)
}

/// Adds the access to the agent's container.
pub(super) fn add_to(container: &mut Value, access: Option<&DeviceAccess>) {
    let Some(access) = access else { return };
    match access.mode {
        DeviceAccessMode::None => {}
        // The device plugin adds all devices to a container that requests one unit.
        DeviceAccessMode::DevicePlugin => {
            if let Some(name) = &access.resource_name {
                for bound in ["requests", "limits"] {
                    container["resources"][bound][name.to_string()] = json!("1");
                }
            }
        }
        DeviceAccessMode::Privileged => {
            container["securityContext"] = json!({ "privileged": true, "readOnlyRootFilesystem": true });
        }
    }
}
