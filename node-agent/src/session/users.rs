//! Tenants of users and groups, which decide the tenant of a session without Kubernetes.
//!
//! A process whose user is listed for a tenant belongs to it, otherwise one whose primary group is listed. It may open
//! sessions of that tenant only. Others may open sessions of tenants without users and groups only. Root and the agent's
//! own user may use all tenants, unless a list names them: they can read the salts anyway.
//!
//! Supplementary groups do not count, because the kernel reports the primary group of a connection only (unix(7)).

use std::ops::RangeInclusive;

use reprise_policy::TenantName;

/// Users and groups of all tenants.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct TenantUsers {
    uids: Vec<(RangeInclusive<u32>, TenantName)>,
    gids: Vec<(RangeInclusive<u32>, TenantName)>,
    /// Users that may use all tenants.
    privileged: Vec<u32>,
}

/// User and primary group of a process when it connected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Ids {
    pub(crate) uid: u32,
    pub(crate) gid: u32,
}

impl TenantUsers {
    /// Adds the users and groups of a tenant.
    ///
    /// # Errors
    /// Ids that two tenants share, as text: tenant, and the ids.
    pub(crate) fn add(
        &mut self,
        tenant: &TenantName,
        uids: &[RangeInclusive<u32>],
        gids: &[RangeInclusive<u32>],
    ) -> Result<(), String> {
        for (ids, all, name) in [(uids, &mut self.uids, "uids"), (gids, &mut self.gids, "gids")] {
            for range in ids {
                let both = |other: &RangeInclusive<u32>| {
                    range.start() <= other.end() && other.start() <= range.end()
                };
                if let Some((other, owner)) = all.iter().find(|(other, _)| both(other)) {
                    let (start, end) = (range.start().max(other.start()), range.end().min(other.end()));
                    return Err(format!("{name} {start}-{end} are listed for tenant '{owner}' too"));
                }
                all.push((range.clone(), tenant.clone()));
            }
        }
        Ok(())
    }

    /// Allows users to use all tenants, unless the users of a tenant include them.
    pub(crate) fn with_privileged(mut self, uids: impl IntoIterator<Item = u32>) -> TenantUsers {
        self.privileged.extend(uids);
        self
    }

    /// Returns the tenant that a process belongs to; `None`: none.
    pub(super) fn tenant_of(&self, ids: Ids) -> Option<&TenantName> {
        let of = |all: &'_ [(RangeInclusive<u32>, TenantName)], id: u32| {
            all.iter().position(|(range, _)| range.contains(&id))
        };
        let by_user = of(&self.uids, ids.uid).map(|at| &self.uids[at].1);
        by_user.or_else(|| of(&self.gids, ids.gid).map(|at| &self.gids[at].1))
    }

    /// Checks whether a process may open a session of a tenant.
    ///
    /// # Errors
    /// The reason and the remedy, for the client.
    pub(super) fn check(&self, ids: Ids, tenant: &TenantName) -> Result<(), String> {
        let Ids { uid, gid } = ids;
        match self.tenant_of(ids) {
            Some(own) if own == tenant => Ok(()),
            Some(own) => Err(format!(
                "user {uid} of group {gid} belongs to tenant '{own}', not to '{tenant}': set the tenant '{own}' (option \
                 `tenant`, or REPRISE_TENANT), or change `uids` and `gids` of the tenants in the agent's configuration"
            )),
            None if self.privileged.contains(&uid) || !self.has(tenant) => Ok(()),
            None => Err(format!(
                "tenant '{tenant}' is kept for its users, and user {uid} of group {gid} is not among them: add it to `uids` \
                 or `gids` of the tenant in the agent's configuration"
            )),
        }
    }

    /// Whether the tenant has users or groups.
    fn has(&self, tenant: &TenantName) -> bool {
        self.uids.iter().chain(&self.gids).any(|(_, owner)| owner == tenant)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tenant(name: &str) -> TenantName {
        name.parse().expect("a name")
    }

    fn users() -> TenantUsers {
        let mut users = TenantUsers::default();
        users.add(&tenant("a"), &[2000..=2999, 7..=7], &[]).expect("no other tenant");
        users.add(&tenant("b"), &[3000..=3000], &[50..=59]).expect("other ids");
        users
    }

    #[test]
    fn user_then_primary_group_decide_the_tenant() {
        let of = |uid, gid| users().tenant_of(Ids { uid, gid }).map(|name| name.as_str().to_owned());
        for (uid, gid, wanted) in [
            (2000, 100, Some("a")),
            (2999, 55, Some("a")),
            (7, 7, Some("a")),
            (3000, 100, Some("b")),
            (1000, 50, Some("b")),
            (1000, 59, Some("b")),
            (1999, 60, None),
            (3001, 49, None),
        ] {
            assert_eq!(of(uid, gid).as_deref(), wanted, "{uid} {gid}");
        }
    }

    #[test]
    fn sessions_have_the_tenant_of_their_user_only() {
        let users = users().with_privileged([0, 2001]);
        let check = |uid, name: &str| users.check(Ids { uid, gid: 100 }, &tenant(name));
        for (uid, name) in [(2000, "a"), (1000, "default"), (1000, "c"), (0, "a"), (0, "default")] {
            assert_eq!(check(uid, name), Ok(()), "{uid} {name}");
        }
        for (uid, name, wanted) in [
            (2000, "b", "set the tenant 'a'"),
            (2000, "default", "REPRISE_TENANT"),
            (2001, "b", "belongs to tenant 'a'"),
            (1000, "a", "kept for its users"),
        ] {
            let words = check(uid, name).expect_err("refused");
            assert!(words.contains(wanted), "{words}");
        }
    }

    #[test]
    fn an_id_of_two_tenants_is_refused() {
        let c = tenant("c");
        let words = users().add(&c, &[2500..=4000], &[]).expect_err("2500 is a's");
        assert_eq!(words, "uids 2500-2999 are listed for tenant 'a' too");
        let words = users().add(&c, &[], &[59..=59]).expect_err("59 is b's");
        assert_eq!(words, "gids 59-59 are listed for tenant 'b' too");
    }
}
