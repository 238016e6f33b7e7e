//! Names that certificates carry: the cluster, and what the process is.
//!
//! A name is the only URI among a certificate's subject alternative names: `reprise://CLUSTER/agent/NODE`,
//! `reprise://CLUSTER/member`, and likewise `etcd`, `operator`, `admin` and `console`. Host names and addresses carry no
//! authority: an agent is the agent of its node behind any address. Only etcd does not read these names, and verifies
//! host names instead.

use std::fmt;
use std::str::FromStr;

/// Longest name of a cluster or a node, as in Kubernetes.
const NAME_CHARS_MAX: usize = 253;

/// Scheme of the URIs.
const SCHEME: &str = "reprise://";

/// What a process is.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Role {
    /// The agent of this node.
    Agent(String),
    /// A control-plane member.
    Member,
    /// A member of the etcd that the operator runs for the control plane.
    Etcd,
    /// The operator.
    Operator,
    /// A person or program that administrates the cluster.
    Admin,
    /// A dashboard that reads and changes nothing.
    Console,
}

/// Name of a process in one cluster.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Identity {
    /// Name of the cluster.
    pub cluster: String,
    /// What the process is there.
    pub role: Role,
}

/// Reason to reject the text of an identity.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NameError {
    /// Not of the form of an identity.
    #[error(
        "invalid identity {0:?}: expected reprise://CLUSTER/agent/NODE, or /member, /etcd, /operator, /admin or /console"
    )]
    Form(String),
    /// A part has other characters than a name in Kubernetes.
    #[error(
        "invalid name {0:?}: expected 1 to 253 lower-case letters, digits, '-' and '.', with a letter or digit at both ends"
    )]
    Part(String),
    /// A role that does not exist.
    #[error("unknown role {0:?}: expected agent/NODE, member, etcd, operator, admin or console")]
    Role(String),
}

impl Identity {
    /// Creates an identity.
    ///
    /// # Errors
    /// The name of the cluster or of the node is invalid.
    pub fn new(cluster: &str, role: Role) -> Result<Identity, NameError> {
        check(cluster)?;
        if let Role::Agent(node) = &role {
            check(node)?;
        }
        Ok(Identity { cluster: cluster.to_owned(), role })
    }
}

impl Role {
    /// Node of an agent; `None` for other roles.
    pub fn node(&self) -> Option<&str> {
        match self {
            Role::Agent(node) => Some(node),
            Role::Member | Role::Etcd | Role::Operator | Role::Admin | Role::Console => None,
        }
    }
}

fn check(part: &str) -> Result<(), NameError> {
    let is_end = |byte: Option<&u8>| byte.is_some_and(u8::is_ascii_alphanumeric);
    let is_inner =
        |byte: &u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || matches!(byte, b'-' | b'.');
    let bytes = part.as_bytes();
    let is_valid = bytes.len() <= NAME_CHARS_MAX
        && bytes.iter().all(is_inner)
        && is_end(bytes.first())
        && is_end(bytes.last());
    if is_valid { Ok(()) } else { Err(NameError::Part(part.to_owned())) }
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Role::Agent(node) => write!(f, "agent/{node}"),
            Role::Member => f.write_str("member"),
            Role::Etcd => f.write_str("etcd"),
            Role::Operator => f.write_str("operator"),
            Role::Admin => f.write_str("admin"),
            Role::Console => f.write_str("console"),
        }
    }
}

impl FromStr for Role {
    type Err = NameError;

    fn from_str(text: &str) -> Result<Role, NameError> {
        match text.split_once('/') {
            Some(("agent", node)) => {
                check(node)?;
                Ok(Role::Agent(node.to_owned()))
            }
            None => match text {
                "member" => Ok(Role::Member),
                "etcd" => Ok(Role::Etcd),
                "operator" => Ok(Role::Operator),
                "admin" => Ok(Role::Admin),
                "console" => Ok(Role::Console),
                _ => Err(NameError::Role(text.to_owned())),
            },
            Some(_) => Err(NameError::Role(text.to_owned())),
        }
    }
}

impl fmt::Display for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{SCHEME}{}/{}", self.cluster, self.role)
    }
}

impl FromStr for Identity {
    type Err = NameError;

    fn from_str(text: &str) -> Result<Identity, NameError> {
        let parts = text.strip_prefix(SCHEME).and_then(|rest| rest.split_once('/'));
        let (cluster, role) = parts.ok_or_else(|| NameError::Form(text.to_owned()))?;
        Identity::new(cluster, role.parse()?)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn every_identity_is_read_back_as_written(
            cluster in "[a-z0-9]([-a-z0-9.]{0,20}[a-z0-9])?",
            node in "[a-z0-9]([-a-z0-9.]{0,20}[a-z0-9])?",
            kind in 0..6_u8,
        ) {
            let role =
                [Role::Agent(node), Role::Member, Role::Etcd, Role::Operator, Role::Admin, Role::Console];
            let identity = Identity::new(&cluster, role[usize::from(kind)].clone()).expect("valid names");
            prop_assert_eq!(identity.to_string().parse(), Ok(identity));
        }

        #[test]
        fn no_text_is_read_as_an_identity_that_is_written_differently(text in "reprise://[a-z/.A-Z_-]{0,20}") {
            if let Ok(identity) = text.parse::<Identity>() {
                prop_assert_eq!(identity.to_string(), text);
            }
        }
    }

    #[test]
    fn invalid_names_are_refused_with_the_expected_form() {
        for (text, words) in [
            ("https://c/member", "reprise://CLUSTER"),
            ("reprise://c", "reprise://CLUSTER"),
            ("reprise://C/member", "lower-case"),
            ("reprise:///member", "1 to 253"),
            ("reprise://c/agent/", "1 to 253"),
            ("reprise://c/agent/a/b", "lower-case"),
            ("reprise://c/agent", "unknown role"),
            ("reprise://c/member/x", "unknown role"),
            ("reprise://c/root", "unknown role"),
        ] {
            let error = text.parse::<Identity>().expect_err(text).to_string();
            assert!(error.contains(words), "{text}: {error}");
        }
    }
}
