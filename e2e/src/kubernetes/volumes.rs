//! Persistent volumes of a cluster: folders on the disks of its nodes, which claims are bound to on demand.
//! There is no provisioner, and a volume is bound only once.

use super::node::Node;

/// The default storage class, which all volumes have.
const CLASS: &str = "
apiVersion: storage.k8s.io/v1
kind: StorageClass
metadata:
  name: folders
  annotations: { storageclass.kubernetes.io/is-default-class: \"true\" }
provisioner: kubernetes.io/no-provisioner
volumeBindingMode: WaitForFirstConsumer
";

/// Volumes on each node: enough for an etcd of three members, another one, and both again after a deletion.
const OF_NODE: u8 = 8;

/// Declared size of each volume, which is not enforced.
const SIZE: &str = "8Gi";

/// Creates the folders, and returns the objects in YAML.
pub(super) fn create(nodes: &[Node]) -> String {
    let mut objects = CLASS.to_owned();
    for node in nodes {
        for number in 1..=OF_NODE {
            let (name, path) = (node.name(), format!("/var/lib/volumes/{number}"));
            let folder = node.root().join(path.trim_start_matches('/'));
            std::fs::create_dir_all(folder).expect("the node's disk is writable");
            objects.push_str(&format!(
                "---
apiVersion: v1
kind: PersistentVolume
metadata: {{ name: {name}-{number} }}
spec:
  capacity: {{ storage: {SIZE} }}
  accessModes: [ReadWriteOnce]
  storageClassName: folders
  persistentVolumeReclaimPolicy: Retain
  local: {{ path: {path} }}
  nodeAffinity:
    required:
      nodeSelectorTerms:
        - matchExpressions: [{{ key: kubernetes.io/hostname, operator: In, values: [{name}] }}]
"
            ));
        }
    }
    objects
}
