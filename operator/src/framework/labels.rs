//! Labels and annotations of every object that the operator applies.

/// Label: the manager of an object.
pub const MANAGED_BY: &str = "app.kubernetes.io/managed-by";
/// The value of [`MANAGED_BY`].
pub const OPERATOR: &str = "reprise-operator";
/// Label: the unique id of the cluster that an object belongs to.
pub const CLUSTER_UID: &str = "reprise.dev/cluster-uid";
/// Annotation: digest of the body that was applied last.
pub const APPLIED: &str = "reprise.dev/applied";
