//! Additions to the agents' pods for access to raw devices, GPUs and RDMA. Each mode adds only the fields in
//! its function below; an addition that several modes request appears once.
//!
//! A privileged container has every device and capability and runs without a seccomp profile, regardless of
//! the rest of its security context. The rest is therefore omitted: the API server rejects
//! `allowPrivilegeEscalation: false` together with `privileged`, and dropped capabilities would not be
//! dropped.
//!
//! The spec of a claim template is immutable, so its name contains a digest of the spec. Another device class
//! results in another template, which new pods reference.

use std::collections::{BTreeMap, BTreeSet};

use reprise_crds::KVCacheCluster;
use reprise_crds::cluster::{DeviceAccess, DeviceAccessMode, GpuAccess, GpuAccessMode, Rdma, RdmaMode};
use serde_json::{Value, json};

use super::agents::CONTAINER;
use super::metadata::metadata;
use super::pods::append;
use crate::framework::child::{Child, ChildKind};
use crate::framework::digest;
use crate::reconcile::cluster::inputs::AgentConfigInputs;
use crate::reconcile::names::{ClusterNames, Component};

/// RDMA cards access memory directly, so it must not move. `ibv_reg_mr` locks it, beyond RLIMIT_MEMLOCK.
const MEMORY_LOCK_CAPABILITY: &str = "IPC_LOCK";
/// Directory of RDMA device files.
const RDMA_FOLDER: &str = "/dev/infiniband";
/// NVIDIA's management device as the GPU operator names it in CDI (Container Device Interface). The pod
/// annotation makes the NRI plugin of NVIDIA's container toolkit add it to a container. See "Requesting a
/// Management CDI Device" in the GPU operator's manual. Annotations of CDI itself (`cdi.k8s.io/…`) apply to
/// containers, not to pods.
const MANAGEMENT_DEVICE: &str = "management.nvidia.com/gpu=all";
const MANAGEMENT_ANNOTATION: &str = "nvidia.cdi.k8s.io/container.";
/// Environment for NVIDIA's runtime: all GPUs, with the driver's management utilities only.
const NVIDIA_ENVIRONMENT: [(&str, &str); 2] =
    [("NVIDIA_VISIBLE_DEVICES", "all"), ("NVIDIA_DRIVER_CAPABILITIES", "utility")];
/// Length of the digest in a template's name, in digits.
const DIGITS: usize = 8;

/// Additions to the agents' pods.
#[derive(Debug, Default)]
pub(super) struct Access {
    is_privileged: bool,
    /// Added capabilities; ignored if the container is privileged.
    capabilities: BTreeSet<&'static str>,
    /// Extended resources; the container requests one unit of each.
    resources: BTreeSet<String>,
    /// Device claims by their name in the pod.
    claims: BTreeMap<&'static str, Claim>,
    annotations: BTreeMap<String, &'static str>,
    environment: Vec<(&'static str, &'static str)>,
    runtime_class: Option<String>,
    uses_host_network: bool,
    /// Mounted directories of the node, by volume name.
    folders: BTreeMap<&'static str, &'static str>,
}

/// A device claim by template, so that each pod gets its own.
#[derive(Debug)]
struct Claim {
    /// Name of the template.
    name: String,
    /// Spec of each claim.
    spec: Value,
}

impl Access {
    /// Returns the additions for the modes of a cluster.
    pub(super) fn of(cluster: &KVCacheCluster, agent_config: &AgentConfigInputs) -> Access {
        let agents = &cluster.spec.agents;
        let mut access = Access::default();
        if agent_config.raw_pools().next().is_some() {
            access.open_devices(&agents.device_access);
        }
        access.reach_gpus(&agents.gpu_access, &agent_config.names);
        access.reach_rdma(&agents.rdma, &agent_config.names);
        access
    }

    /// Whether agents may drive NVMe controllers themselves, and grant queue pairs of them to engines.
    pub(super) fn drives_controllers(&self) -> bool {
        self.is_privileged
    }

    fn open_devices(&mut self, wanted: &DeviceAccess) {
        match wanted.mode {
            DeviceAccessMode::None => {}
            DeviceAccessMode::DevicePlugin => {
                self.resources.extend(wanted.resource_name.iter().map(ToString::to_string));
            }
            DeviceAccessMode::Privileged => self.is_privileged = true,
        }
    }

    fn reach_gpus(&mut self, wanted: &GpuAccess, names: &ClusterNames) {
        match wanted.mode {
            GpuAccessMode::None => {}
            GpuAccessMode::Dra => {
                // Admin access to all GPUs, next to the pods that use them.
                let all = json!({
                    "deviceClassName": wanted.device_class_name, "allocationMode": "All", "adminAccess": true,
                });
                self.claim("gpus", &all, names);
            }
            GpuAccessMode::ManagementCdi => {
                self.annotations.insert(format!("{MANAGEMENT_ANNOTATION}{CONTAINER}"), MANAGEMENT_DEVICE);
            }
            GpuAccessMode::RuntimeClass => {
                self.runtime_class = wanted.runtime_class_name.as_ref().map(ToString::to_string);
                self.environment.extend(NVIDIA_ENVIRONMENT);
            }
            GpuAccessMode::Privileged => self.is_privileged = true,
        }
    }

    fn reach_rdma(&mut self, wanted: &Rdma, names: &ClusterNames) {
        match wanted.mode {
            RdmaMode::None => {}
            RdmaMode::DevicePlugin | RdmaMode::SrIov => {
                self.resources.extend(wanted.resource_name.iter().map(ToString::to_string));
                self.capabilities.insert(MEMORY_LOCK_CAPABILITY);
            }
            RdmaMode::Dra => {
                let one = json!({
                    "deviceClassName": wanted.device_class_name, "allocationMode": "ExactCount", "count": 1,
                });
                self.claim("rdma", &one, names);
                self.capabilities.insert(MEMORY_LOCK_CAPABILITY);
            }
            // The pod gets no device in this mode, and the device cgroup denies devices that were not
            // assigned to the container.
            RdmaMode::HostNetwork => {
                self.uses_host_network = true;
                self.folders.insert("rdma", RDMA_FOLDER);
                self.is_privileged = true;
            }
        }
    }

    fn claim(&mut self, name: &'static str, exactly: &Value, names: &ClusterNames) {
        let spec = json!({ "spec": { "devices": { "requests": [{ "name": name, "exactly": exactly }] } } });
        let digest = digest::of(&spec.to_string());
        let digits: String = digest.trim_start_matches("sha256:").chars().take(DIGITS).collect();
        self.claims.insert(name, Claim { name: names.claim(name, &digits), spec });
    }

    /// Returns the templates of the claims.
    pub(super) fn templates(&self, cluster: &KVCacheCluster, names: &ClusterNames) -> Vec<Child> {
        let template = |claim: &Claim| {
            let metadata = metadata(cluster, names, Component::Agent, &claim.name);
            let rest = json!({ "spec": claim.spec });
            Child::new(ChildKind::ResourceClaimTemplate, metadata, &rest)
        };
        self.claims.values().map(template).collect()
    }

    /// Adds the additions to a pod template whose first container is the agent's.
    pub(super) fn add_to(&self, template: &mut Value) {
        for (name, value) in &self.annotations {
            template["metadata"]["annotations"][name] = json!(value);
        }
        let pod = &mut template["spec"];
        if let Some(class) = &self.runtime_class {
            pod["runtimeClassName"] = json!(class);
        }
        if self.uses_host_network {
            pod["hostNetwork"] = json!(true);
            // With the node's DNS policy, service names cannot be resolved.
            pod["dnsPolicy"] = json!("ClusterFirstWithHostNet");
        }
        for (name, claim) in &self.claims {
            append(
                &mut pod["resourceClaims"],
                json!({ "name": name, "resourceClaimTemplateName": claim.name }),
            );
        }
        for (name, path) in &self.folders {
            // On a node without the directory the pod does not start; its events state the reason.
            let of_node = json!({ "path": path, "type": "Directory" });
            append(&mut pod["volumes"], json!({ "name": name, "hostPath": of_node }));
        }
        self.add_to_container(&mut pod["containers"][0]);
    }

    fn add_to_container(&self, container: &mut Value) {
        for (name, value) in &self.environment {
            append(&mut container["env"], json!({ "name": name, "value": value }));
        }
        for (name, path) in &self.folders {
            append(&mut container["volumeMounts"], json!({ "name": name, "mountPath": path }));
        }
        let resources = &mut container["resources"];
        for name in &self.resources {
            for bound in ["requests", "limits"] {
                resources[bound][name] = json!("1");
            }
        }
        for name in self.claims.keys() {
            append(&mut resources["claims"], json!({ "name": name }));
        }
        let context = &mut container["securityContext"];
        if self.is_privileged {
            context["privileged"] = json!(true);
            for other in ["allowPrivilegeEscalation", "capabilities"] {
                context.as_object_mut().expect("made by us").remove(other);
            }
        } else if !self.capabilities.is_empty() {
            context["capabilities"]["add"] = json!(self.capabilities);
        }
    }
}
