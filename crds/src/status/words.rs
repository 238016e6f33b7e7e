//! The types and reasons of conditions, each with its meaning.
//!
//! Polarity: `Ready` and most other types are good when true. `Degraded`, `Cordoned`, `Drifted`,
//! `OverQuota`, `EngineFallback`, `DeletionBlocked` and `StatusContested` report a
//! state that an operator may want to act on.

macro_rules! words {
    ($(#[doc = $doc:literal])+ $name:ident { $($(#[doc = $word_doc:literal])+ $word:ident,)+ }) => {
        $(#[doc = $doc])+
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub enum $name {
            $($(#[doc = $word_doc])+ $word,)+
        }

        impl $name {
            /// All values with their meanings, in the order of the documentation.
            pub const MEANINGS: &'static [($name, &'static str)] =
                &[$(($name::$word, concat!($($word_doc),+).trim_ascii())),+];

            /// Returns the value as it appears in a condition.
            pub fn as_str(self) -> &'static str {
                match self {
                    $($name::$word => stringify!($word),)+
                }
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(self.as_str())
            }
        }
    };
}

words! {
    /// Type of a condition.
    ConditionType {
        /// The object matches its spec on every node that it applies to.
        Ready,
        /// The operator has validated the spec and its references. False: the spec is not applied. With reason `Conflict`, it
        /// is applied where no older object contradicts it.
        Accepted,
        /// A change is in progress: pods are rolling, nodes are joining or devices are being opened.
        Progressing,
        /// The object works, but does not fully match its spec.
        Degraded,
        /// The control plane's members can reach etcd.
        EtcdReady,
        /// All control plane members are ready.
        ControlPlaneReady,
        /// The agents on all selected nodes are ready.
        AgentsReady,
        /// The operator can issue the certificates of agents and members, and the authority does not end
        /// soon.
        CertificatesReady,
        /// Every pool in `spec.pools` exists and is accepted.
        PoolsBound,
        /// The versions of all running agents and members are known and differ by at most one minor
        /// version.
        Compatible,
        /// All nodes of the pool have reported their devices.
        DevicesDiscovered,
        /// The pool or node receives no replicas of other nodes' blocks.
        Cordoned,
        /// Every durable block of the node or pool also has a replica on another node.
        Drained,
        /// At least one device uses another I/O engine than the requested one.
        EngineFallback,
        /// The deletion waits for an action of a user or another controller; the message names it.
        DeletionBlocked,
        /// The requested queue pairs are reserved on the node.
        Allocated,
        /// All granted queue pairs exist: engines have created them. False: the message names the cause.
        Programmed,
        /// The agent has released the queue pairs; no process can use them any longer.
        Released,
        /// The profile's content is valid.
        Valid,
        /// All target nodes have received the profile.
        Distributed,
        /// All target nodes have validated a revision of the profile.
        Active,
        /// Measurements on nodes differ from the profile by more than `spec.maxErrorPercent`.
        Drifted,
        /// The reservations of all tenants fit the available capacity.
        QuotaFeasible,
        /// `status.usage` is current for all connected nodes. False or unknown: it holds the last known
        /// figures.
        UsageKnown,
        /// The tenant exceeds its budget in a cluster, and its blocks are being evicted.
        OverQuota,
        /// The node's agent serves engines.
        AgentReady,
        /// The agent is connected to the control plane.
        Connected,
        /// All devices of the node are open.
        DevicesReady,
        /// The agent runs with the latest configuration from the operator.
        ConfigurationApplied,
        /// Another writer changes status fields that the agent owns. The agent restores them; the message
        /// names the writer.
        StatusContested,
        /// The control plane applies the mode in the spec. Set by the operator.
        ModeApplied,
        /// The control planes of the tenant's clusters enforce its budget.
        BudgetApplied,
        /// Agents accept only the pods selected by the tenant as that tenant.
        PodsBound,
        /// The Secrets of the tenant's clusters have its encryption key, which agents read within two minutes. False with
        /// reason `Erased`: no node has blocks of the tenant.
        KeyAvailable,
        /// Sessions of all tenants may read the tenant's blocks.
        Public,
    }
}

words! {
    /// Reason of a condition.
    Reason {
        /// The observed state matches the spec.
        AsDesired,
        /// The change is in progress; no action is needed.
        Progressing,
        /// The object is paused; the operator changes nothing.
        Paused,
        /// A field has an invalid value; the message names the field.
        InvalidSpec,
        /// No engine has requested the granted queue pairs, or not all of them.
        NotRequested,
        /// The requested mode is not available in this release.
        Unsupported,
        /// A referenced object does not exist.
        ReferenceNotFound,
        /// A Secret lacks an entry, or an entry cannot be parsed.
        SecretInvalid,
        /// An authority ends within a year; the message names the remedy.
        EndsSoon,
        /// An older object already claims the same resource.
        Conflict,
        /// Another field manager owns a field; the message names it.
        FieldConflict,
        /// etcd does not answer, or rejects requests.
        EtcdUnreachable,
        /// etcd answers, but some of its members are missing.
        MembersMissing,
        /// The control plane does not answer, or cannot serve the request at the moment.
        ControlPlaneUnreachable,
        /// Another writer changed the value; the operator restored it.
        SetBack,
        /// Component versions differ by more than one minor version.
        VersionSkew,
        /// No node matches the selector.
        NoNodes,
        /// Nodes have not reported within the expected time.
        NotReported,
        /// Some nodes are not ready.
        NodesNotReady,
        /// No device matches the pool.
        NoDevices,
        /// The requested storage class does not exist, or the cluster has no default storage class.
        NoStorageClass,
        /// A device carries data of another program.
        ForeignSignature,
        /// A device has failed.
        DeviceFailed,
        /// The container runtime of a node denies the agent access to a device.
        DeviceNotPermitted,
        /// Device reads exceed the latency that the pool allows. The device stays in use.
        DeviceSlow,
        /// A device exceeds the pool's limit of media errors, or has too little spare capacity. It stays in
        /// use.
        DeviceWorn,
        /// The requested I/O engine is not available on some nodes.
        EngineUnavailable,
        /// The object is in use; the message names the users.
        InUse,
        /// The confirmation field is not set.
        ConfirmationMissing,
        /// A wipe, release or purge is still in progress.
        Releasing,
        /// The encryption key is gone, and no node has blocks of the tenant.
        Erased,
        /// The request exceeds the remaining budget.
        OverBudget,
        /// The reservations exceed the capacity.
        OverCapacity,
        /// The usage exceeds the limit.
        AboveLimit,
        /// The time to live of the grant has passed.
        Expired,
        /// A guaranteed allocation has preempted the grant.
        TakenBack,
        /// The profile was measured on another GPU model.
        WrongGpu,
        /// The profile's content is invalid.
        ProfileInvalid,
        /// Measurements on nodes differ from the profile.
        MeasuredDifference,
        /// A node has rejected the object; the message names the node and the cause.
        Refused,
        /// The operator lacks a permission; the message names it.
        Forbidden,
        /// The agent was stopped, or its node no longer exists.
        AgentGone,
        /// The node's durable blocks are being copied to other nodes.
        Draining,
        /// The node is cordoned and receives no replicas from other nodes.
        SetByOperator,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn types_and_reasons_are_unique_and_fit_their_fields() {
        let types = ConditionType::MEANINGS.iter().map(|(word, meaning)| (word.as_str(), *meaning));
        let reasons = Reason::MEANINGS.iter().map(|(word, meaning)| (word.as_str(), *meaning));
        for words in [types.collect::<Vec<_>>(), reasons.collect()] {
            for (at, (word, meaning)) in words.iter().enumerate() {
                assert!(word.len() <= 64 && word.bytes().all(|byte| byte.is_ascii_alphabetic()), "{word}");
                assert!(meaning.ends_with('.'), "{word}: {meaning}");
                assert!(words[..at].iter().all(|(other, _)| other != word), "{word} twice");
            }
        }
    }
}
