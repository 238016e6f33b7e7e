//! What modes of a cluster add to its agents' pods beyond the host path: raw devices, GPUs, RDMA. Each adds what stands in its function
//! here and nothing else; what two of them ask for is there once.
//!
//! A privileged container has every device and every capability and runs without a seccomp profile, whatever else its security context
//! says. So nothing else is said there: the API server refuses `allowPrivilegeEscalation: false` beside it, and capabilities that are
//! dropped would not be.
//!
//! The spec of a claim's template cannot be changed, so a digest of it is in its name: another class is another template, and pods that are
//! made from then on name that one.

use std::collections::{BTreeMap, BTreeSet};

use reprise_crds::KVCacheCluster;
use reprise_crds::cluster::{DeviceAccess, DeviceAccessMode, GpuAccess, GpuAccessMode, Rdma, RdmaMode};
use serde_json::{Value, json};

use super::agents::CONTAINER;
use super::metadata;
use crate::child::{Child, ChildKind, Ownership};
use crate::cluster::dereference::Referred;
use crate::digest;
use crate::names::{ClusterNames, Component};

/// Memory that a network card reads and writes by itself must not move: `ibv_reg_mr` locks it, beyond what RLIMIT_MEMLOCK allows.
const LOCKS_MEMORY: &str = "IPC_LOCK";
/// Where the kernel has the devices of RDMA.
const RDMA_FOLDER: &str = "/dev/infiniband";
/// NVIDIA's management device, as the GPU operator names it in the Container Device Interface, and the annotation of pods by which the NRI
/// plugin of NVIDIA's container toolkit gives it to a container ("Requesting a Management CDI Device" of the GPU operator's manual).
/// Annotations of the interface itself (`cdi.k8s.io/…`) are those of containers, which pods have no way to give.
const MANAGEMENT_DEVICE: &str = "management.nvidia.com/gpu=all";
const MANAGEMENT_ANNOTATION: &str = "nvidia.cdi.k8s.io/container.";
/// What NVIDIA's runtime goes by: all GPUs, and of the driver what lists and looks after them.
const SHOWN: [(&str, &str); 2] =
    [("NVIDIA_VISIBLE_DEVICES", "all"), ("NVIDIA_DRIVER_CAPABILITIES", "utility")];
/// Digits of a digest in a template's name.
const DIGITS: usize = 8;

/// What is added.
#[derive(Debug, Default)]
pub(super) struct Access {
    is_privileged: bool,
    /// Capabilities of the container, where it is not privileged.
    capabilities: BTreeSet<&'static str>,
    /// Extended resources, of which it asks for one each.
    resources: BTreeSet<String>,
    /// Claims, by their names in the pod.
    claims: BTreeMap<&'static str, Claim>,
    annotations: BTreeMap<String, &'static str>,
    environment: Vec<(&'static str, &'static str)>,
    runtime_class: Option<String>,
    is_on_the_nodes_network: bool,
    /// Directories of the node, under their own paths, by the names of their volumes.
    folders: BTreeMap<&'static str, &'static str>,
}

/// A claim of devices, by a template: each pod gets its own.
#[derive(Debug)]
struct Claim {
    /// Name of the template.
    name: String,
    /// What each claim asks for.
    spec: Value,
}

impl Access {
    /// What the modes of a cluster add.
    pub(super) fn of(cluster: &KVCacheCluster, referred: &Referred) -> Access {
        let agents = &cluster.spec.agents;
        let mut access = Access::default();
        if referred.raw_pools().next().is_some() {
            access.open_devices(&agents.device_access);
        }
        access.reach_gpus(&agents.gpu_access, &referred.names);
        access.reach_rdma(&agents.rdma, &referred.names);
        access
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
                // All of them, and beside those who use them.
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
                self.environment.extend(SHOWN);
            }
            GpuAccessMode::Privileged => self.is_privileged = true,
        }
    }

    fn reach_rdma(&mut self, wanted: &Rdma, names: &ClusterNames) {
        match wanted.mode {
            RdmaMode::None => {}
            RdmaMode::DevicePlugin | RdmaMode::SrIov => {
                self.resources.extend(wanted.resource_name.iter().map(ToString::to_string));
                self.capabilities.insert(LOCKS_MEMORY);
            }
            RdmaMode::Dra => {
                let one = json!({
                    "deviceClassName": wanted.device_class_name, "allocationMode": "ExactCount", "count": 1,
                });
                self.claim("rdma", &one, names);
                self.capabilities.insert(LOCKS_MEMORY);
            }
            // Nobody gives the pod a device here, and the device cgroup lets it open none that it was not given.
            RdmaMode::HostNetwork => {
                self.is_on_the_nodes_network = true;
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

    /// The templates of the claims.
    pub(super) fn templates(&self, cluster: &KVCacheCluster, names: &ClusterNames) -> Vec<Child> {
        let template = |claim: &Claim| {
            let metadata = metadata(cluster, names, Component::Agent, &claim.name);
            let rest = json!({ "spec": claim.spec });
            Child::new(ChildKind::ResourceClaimTemplate, Ownership::OursAlone, metadata, &rest)
        };
        self.claims.values().map(template).collect()
    }

    /// Adds it to the template of a pod whose first container is the agent's.
    pub(super) fn add_to(&self, template: &mut Value) {
        for (name, value) in &self.annotations {
            template["metadata"]["annotations"][name] = json!(value);
        }
        let pod = &mut template["spec"];
        if let Some(class) = &self.runtime_class {
            pod["runtimeClassName"] = json!(class);
        }
        if self.is_on_the_nodes_network {
            pod["hostNetwork"] = json!(true);
            // Otherwise names are looked up as on the node, which does not know services.
            pod["dnsPolicy"] = json!("ClusterFirstWithHostNet");
        }
        for (name, claim) in &self.claims {
            append(
                &mut pod["resourceClaims"],
                json!({ "name": name, "resourceClaimTemplateName": claim.name }),
            );
        }
        for (name, path) in &self.folders {
            // A node that does not have it gets no agent, and the pod's events say so.
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

/// Adds to a list, which is there from then on.
fn append(list: &mut Value, item: Value) {
    if list.is_null() {
        *list = json!([]);
    }
    list.as_array_mut().expect("a list of ours").push(item);
}
