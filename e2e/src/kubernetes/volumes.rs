//! Volumes of a cluster: folders on the disks of its nodes, bound to claims as they come. Nothing makes more of them, and one that was
//! bound once is not bound again.

use super::node::Node;

/// The class of all of them, and of claims that name none.
const CLASS: &str = "
apiVersion: storage.k8s.io/v1
kind: StorageClass
metadata:
  name: folders
  annotations: { storageclass.kubernetes.io/is-default-class: \"true\" }
provisioner: kubernetes.io/no-provisioner
volumeBindingMode: WaitForFirstConsumer
";

/// On each node: an etcd of three members, another one, and both again after they were removed.
const OF_NODE: u8 = 8;

/// Bytes of each, as far as claims are concerned: nothing holds anybody to it.
const SIZE: &str = "8Gi";

/// Makes the folders, and says the objects.
pub(super) fn lay_down(nodes: &[Node]) -> String {
    let mut objects = CLASS.to_owned();
    for node in nodes {
        for number in 1..=OF_NODE {
            let (name, path) = (node.name(), format!("/var/lib/volumes/{number}"));
            let folder = node.root().join(path.trim_start_matches('/'));
            std::fs::create_dir_all(folder).expect("a node's disk takes folders");
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
