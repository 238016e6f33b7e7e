//! The types of conditions and their reasons, each with its meaning.
//!
//! Polarity: `Ready` and its kin are good when true; `Degraded`, `Cordoned`, `Drifted`, `OverQuota`, `EngineFallback`,
//! `TransportFallback`, `DeletionBlocked` and `StatusContested` tell of something that somebody may want to act on.

macro_rules! words {
    ($(#[doc = $doc:literal])+ $name:ident { $($(#[doc = $word_doc:literal])+ $word:ident,)+ }) => {
        $(#[doc = $doc])+
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub enum $name {
            $($(#[doc = $word_doc])+ $word,)+
        }

        impl $name {
            /// All words with their meaning, in the order of the documentation.
            pub const MEANINGS: &'static [($name, &'static str)] =
                &[$(($name::$word, concat!($($word_doc),+).trim_ascii())),+];

            /// The word.
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
    /// Types of conditions.
    ConditionType {
        /// The object does what its spec says, on every node that it should.
        Ready,
        /// The spec was read and found right, its references included. False: nothing was changed.
        Accepted,
        /// Something is under way: pods roll, nodes join, devices are opened.
        Progressing,
        /// It works, with less than the spec asks for.
        Degraded,
        /// The store of the control plane answers the control plane's members.
        EtcdReady,
        /// All members of the control plane are ready.
        ControlPlaneReady,
        /// The agents of all selected nodes are ready.
        AgentsReady,
        /// Every pool that the cluster names is there and accepted.
        PoolsBound,
        /// Versions of all agents and members that run are known, and no two differ by more than one minor version.
        Compatible,
        /// The nodes of a pool have said which devices they found.
        DevicesDiscovered,
        /// Nothing is placed on the pool or node for others.
        Cordoned,
        /// Every durable block of the node or pool is on another node as well.
        Drained,
        /// Devices are driven by another engine than the wanted one.
        EngineFallback,
        /// Agents speak to each other by another transport than the wanted one.
        TransportFallback,
        /// A deletion waits for somebody.
        DeletionBlocked,
        /// The wanted queue pairs are set aside on the node.
        Allocated,
        /// The agent has made the queue pairs. No agent of this release does; the message says whether it keeps them.
        Programmed,
        /// The agent has let go of the queue pairs; nobody can use them any more.
        Released,
        /// The profile has been read, and is one.
        Valid,
        /// All nodes that should have the profile have it.
        Distributed,
        /// All nodes that should have the profile have some revision of it checked and ready. Nothing on the data path uses it in this
        /// release.
        Active,
        /// What nodes measure differs from the profile by more than it allows. No agent of this release measures it.
        Drifted,
        /// The reservations of all tenants together fit what is there.
        QuotaFeasible,
        /// What the tenant holds was found lately, of all nodes that are not away. Otherwise `status.usage` is what was found before.
        UsageKnown,
        /// The tenant holds more in a cluster than its budget allows, and gives way.
        OverQuota,
        /// The agent of the node serves engines.
        AgentReady,
        /// The agent is connected to the control plane.
        Connected,
        /// All devices of the node are open.
        DevicesReady,
        /// The node runs by the configuration that the operator gave it last.
        ConfigurationApplied,
        /// Somebody else writes fields of the status that are the agent's alone; they are put back, and the message names whom.
        StatusContested,
        /// The control plane has the mode that the object says. Written by the operator.
        ModeApplied,
        /// The control planes of the tenant's clusters keep to its budget.
        BudgetApplied,
        /// Agents take the pods that the tenant names for it, and nobody else.
        PodsBound,
    }
}

words! {
    /// Reasons of conditions.
    Reason {
        /// All is as the spec says.
        AsDesired,
        /// Under way; nothing to do.
        Progressing,
        /// The object is paused; the operator changes nothing.
        Paused,
        /// A field has a value that cannot work; the message says which.
        InvalidSpec,
        /// A mode that this release does not have.
        Unsupported,
        /// An object that is referred to is not there.
        ReferenceNotFound,
        /// A Secret lacks an entry, or has one that cannot be read.
        SecretInvalid,
        /// Another object claims the same, and was there before.
        Conflict,
        /// Another writer owns a field; the message names it.
        FieldConflict,
        /// etcd does not answer, or refuses.
        EtcdUnreachable,
        /// etcd answers without some of its members.
        MembersMissing,
        /// The control plane does not answer, or cannot do it at the moment.
        ControlPlaneUnreachable,
        /// Somebody else had changed it; it is again what the object says.
        SetBack,
        /// Components differ by more than one minor version.
        VersionSkew,
        /// No node matches the selection.
        NoNodes,
        /// Nodes have not reported for too long.
        NotReported,
        /// Some nodes are not ready.
        NodesNotReady,
        /// No device matches.
        NoDevices,
        /// Volumes ask for a storage class that is not there, or for the default one, and none is.
        NoStorageClass,
        /// A device carries data of somebody else.
        ForeignSignature,
        /// A device has failed.
        DeviceFailed,
        /// The runtime of a node keeps its agent from a device.
        DeviceNotPermitted,
        /// Reads of a device take longer than its pool allows; it is used all the same.
        DeviceSlow,
        /// A device has more media errors, or less spare capacity, than its pool allows; it is used all the same.
        DeviceWorn,
        /// The wanted engine cannot be had on some nodes.
        EngineUnavailable,
        /// The object is used; the message says by whom.
        InUse,
        /// A typed confirmation is missing.
        ConfirmationMissing,
        /// A wipe, release or purge is not finished.
        Releasing,
        /// More is asked for than the budget has left.
        OverBudget,
        /// More is reserved than there is.
        OverCapacity,
        /// More is held than the limit allows.
        AboveLimit,
        /// The time of the grant is over.
        Expired,
        /// What it had was needed by one that is guaranteed.
        TakenBack,
        /// The profile was measured on another GPU.
        WrongGpu,
        /// The profile's content is not a profile.
        ProfileInvalid,
        /// Measurements of the nodes differ from the profile.
        MeasuredDifference,
        /// A node has refused it; the message says which, and why.
        Refused,
        /// The operator lacks a right; the message says for what.
        Forbidden,
        /// An agent was stopped, or its node is gone.
        AgentGone,
        /// The node is being emptied.
        Draining,
        /// The node is kept from new blocks.
        SetByOperator,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_unique_and_fit_their_fields() {
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
