//! What tenants hold in a cluster.
//!
//! Each member knows it of the tenants whose hash slots are its own, from what nodes report to it. So all members are asked at once, for all tenants
//! of the cluster, and who is not answered for is not known to hold nothing: a member was not reached, or is not sure of its place. A sum is
//! not told either while nodes have not reported to the member that adds it up.
//!
//! An answer for all holds for [`STAYS_WHOLE`], for whoever asks; an incomplete one is asked for again soon. While nobody calls since a call was
//! not answered, nobody asks for this either, and one for this that is not answered counts among them.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use reprise_policy::tenant::TENANTS_MAX;
use reprise_proto::controlplane::membership_client::MembershipClient;
use reprise_proto::controlplane::placement_client::PlacementClient;
use reprise_proto::controlplane::{
    self as wire, ListHoldingsReply, ListHoldingsRequest, ListMembersRequest, MemberInfo, TenantHolding,
};
use tonic::Code;
use tonic::transport::Channel;

use super::{ControlPlanes, LOOK_SOON, Room, Unmet, channel, result, within};
use crate::metrics::{Call, Metrics};
use crate::names::ClusterNames;

/// How long an answer for all tenants holds. Statuses change no sooner either.
const STAYS_WHOLE: Duration = Duration::from_secs(60);
/// How long one holds in which something is missing.
const STAYS_PARTIAL: Duration = LOOK_SOON;
/// For each member, of the time that all of it may take.
const MEMBER_PATIENCE: Duration = Duration::from_secs(1);
/// Nodes that are named at the most: a condition is for people.
const NAMED_MAX: usize = 4;

/// What a tenant holds in a cluster.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Holding {
    /// Bytes.
    pub used: Room,
    /// Slots, where everybody says them.
    pub blocks: Option<Room>,
    /// Nodes that are away, and are not counted.
    pub away: u32,
}

/// Why nobody can say what a tenant holds, in words for people.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Unmeasured {
    /// Members could not be asked, or none of them is sure that the tenant is its own.
    Unasked(String),
    /// Nodes have not reported yet.
    Unheard(String),
}

/// The last answer.
#[derive(Debug)]
pub(super) struct Look {
    until: Instant,
    asked: BTreeSet<String>,
    answers: Answers,
}

/// What all members have said.
#[derive(Clone, Debug, Default)]
struct Answers {
    tenants: BTreeMap<String, Result<Holding, Unmeasured>>,
    /// Members that did not answer, each with why.
    silent: Vec<String>,
}

impl ControlPlanes {
    /// What a tenant holds in a cluster that knows `tenants`.
    ///
    /// # Errors
    /// [`Unmeasured`].
    pub async fn held(
        &self,
        cluster: &ClusterNames,
        tenant: &str,
        tenants: &[String],
        metrics: &Metrics,
    ) -> Result<Holding, Unmeasured> {
        let plane = self.plane(cluster);
        let mut last = plane.holdings.lock().await;
        let holds = |look: &&Look| Instant::now() < look.until && look.asked.contains(tenant);
        if let Some(look) = last.as_ref().filter(holds) {
            return look.answers.of(tenant);
        }
        if let Some(unmet) = self.silence(cluster).await {
            return Err(Unmeasured::Unasked(unmet.words().to_owned()));
        }
        let others = tenants.iter().filter(|other| *other != tenant);
        let asked: BTreeSet<String> =
            std::iter::once(tenant.to_owned()).chain(others.cloned()).take(TENANTS_MAX).collect();
        let answered = within(ask(&self.address(cluster), &asked)).await;
        metrics.called(Call::ListHoldings, result(&answered));
        if answered.is_err() {
            self.note(cluster, &answered, |_| {}).await;
        }
        let answers = answered.map_err(|unmet| Unmeasured::Unasked(unmet.words().to_owned()))?;
        let stays = if answers.is_whole(&asked) { STAYS_WHOLE } else { STAYS_PARTIAL };
        let held = answers.of(tenant);
        *last = Some(Look { until: Instant::now() + stays, asked, answers });
        held
    }
}

impl Answers {
    fn take(&mut self, reply: ListHoldingsReply) {
        let ListHoldingsReply { tenants, unheard, unheard_nodes, away_nodes } = reply;
        let words = (unheard_nodes > 0).then(|| unheard_words(&unheard, unheard_nodes));
        for TenantHolding { tenant, used, blocks } in tenants {
            let held = Holding {
                used: used.map(Room::from).unwrap_or_default(),
                blocks: blocks.map(|wire::Blocks { dram, nvme }| Room { dram, ssd: nvme }),
                away: away_nodes,
            };
            let held = words.clone().map_or(Ok(held), |words| Err(Unmeasured::Unheard(words)));
            self.tenants.entry(tenant).or_insert(held);
        }
    }

    fn of(&self, tenant: &str) -> Result<Holding, Unmeasured> {
        let unanswered = || {
            Err(Unmeasured::Unasked(if self.silent.is_empty() {
                "no member is sure at the moment that it keeps the tenant".to_owned()
            } else {
                format!(
                    "the member that keeps the tenant is one of those that did not answer: {}",
                    self.silent.join(", ")
                )
            }))
        };
        self.tenants.get(tenant).cloned().unwrap_or_else(unanswered)
    }

    fn is_whole(&self, asked: &BTreeSet<String>) -> bool {
        asked.iter().all(|tenant| matches!(self.tenants.get(tenant), Some(Ok(_))))
    }
}

async fn ask(address: &str, tenants: &BTreeSet<String>) -> Result<Answers, Unmet> {
    let first = channel(address).await?;
    let listed = MembershipClient::new(first.clone()).list_members(ListMembersRequest {}).await?;
    let members = listed.into_inner();
    let asked = join_all(members.members.iter().map(|member| {
        // The one that answers is reached where it has answered.
        let known = (member.name == members.answering).then(|| first.clone());
        ask_member(member, known, tenants)
    }));
    let mut answers = Answers::default();
    for (member, said) in members.members.iter().zip(asked.await) {
        match said {
            Ok(reply) => answers.take(reply),
            Err(unmet) => answers.silent.push(format!("{} ({})", member.name, unmet.words())),
        }
    }
    Ok(answers)
}

/// Who hangs keeps nobody else from being heard.
async fn ask_member(
    member: &MemberInfo,
    known: Option<Channel>,
    tenants: &BTreeSet<String>,
) -> Result<ListHoldingsReply, Unmet> {
    let request = ListHoldingsRequest { tenants: tenants.iter().cloned().collect() };
    let asked = tokio::time::timeout(MEMBER_PATIENCE, async {
        let reached = match known {
            Some(reached) => reached,
            None => channel(&member.address).await?,
        };
        match PlacementClient::new(reached).list_holdings(request).await {
            Ok(reply) => Ok(reply.into_inner()),
            Err(status) if status.code() == Code::Unimplemented => {
                Err(Unmet::Refused("its version cannot say it: upgrade it".to_owned()))
            }
            Err(status) => Err(status.into()),
        }
    });
    asked.await.unwrap_or_else(|_| Err(Unmet::Absent(format!("no answer within {MEMBER_PATIENCE:?}"))))
}

/// Who has not reported yet.
fn unheard_words(names: &[String], nodes: u32) -> String {
    let named = &names[..names.len().min(NAMED_MAX)];
    let more = usize::try_from(nodes).unwrap_or(usize::MAX).saturating_sub(named.len());
    let more = if more == 0 { String::new() } else { format!(" and {more} more") };
    format!("not all nodes have said yet what they hold: {}{more}", named.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reply(tenants: &[(&str, u64)], unheard: &[&str], away_nodes: u32) -> ListHoldingsReply {
        let holding = |(tenant, bytes): &(&str, u64)| TenantHolding {
            tenant: (*tenant).to_owned(),
            used: Some(wire::Bytes { dram: 1, nvme: *bytes }),
            blocks: Some(wire::Blocks { dram: 2, nvme: 3 }),
        };
        ListHoldingsReply {
            tenants: tenants.iter().map(holding).collect(),
            unheard: unheard.iter().map(|name| (*name).to_owned()).collect(),
            unheard_nodes: unheard.len() as u32,
            away_nodes,
        }
    }

    fn asked(tenants: &[&str]) -> BTreeSet<String> {
        tenants.iter().map(|name| (*name).to_owned()).collect()
    }

    #[test]
    fn members_answer_each_for_its_own_tenants_and_together_for_all() {
        let mut answers = Answers::default();
        answers.take(reply(&[("a", 10), ("b", 0)], &[], 1));
        assert!(!answers.is_whole(&asked(&["a", "b", "c"])), "one is missing");
        answers.take(reply(&[("c", 30)], &[], 0));
        assert!(answers.is_whole(&asked(&["a", "b", "c"])));
        let held =
            |ssd, away| Holding { used: Room { dram: 1, ssd }, blocks: Some(Room { dram: 2, ssd: 3 }), away };
        assert_eq!(answers.of("a"), Ok(held(10, 1)));
        assert_eq!(answers.of("b"), Ok(held(0, 1)), "it holds nothing, which somebody has said");
        assert_eq!(answers.of("c"), Ok(held(30, 0)));
    }

    #[test]
    fn what_nobody_has_answered_for_is_not_nothing() {
        let mut answers = Answers::default();
        answers.take(reply(&[("a", 10)], &[], 0));
        let Err(Unmeasured::Unasked(words)) = answers.of("b") else { panic!("{answers:?}") };
        assert!(words.contains("no member is sure"), "{words}");
        answers.silent.push("m-1 (refused)".to_owned());
        let Err(Unmeasured::Unasked(words)) = answers.of("b") else { panic!("{answers:?}") };
        assert!(words.ends_with("did not answer: m-1 (refused)"), "{words}");
        assert!(answers.of("a").is_ok(), "its member has answered");
    }

    #[test]
    fn a_sum_that_may_be_too_small_is_not_told_and_of_many_nodes_some_are_named() {
        let mut answers = Answers::default();
        answers.take(reply(&[("a", 10)], &["n1", "n2", "n3", "n4", "n5", "n6"], 0));
        assert!(!answers.is_whole(&asked(&["a"])));
        let Err(Unmeasured::Unheard(words)) = answers.of("a") else { panic!("{answers:?}") };
        assert!(words.ends_with(": n1, n2, n3, n4 and 2 more"), "{words}");
        assert!(unheard_words(&["n1".to_owned()], 1).ends_with(": n1"));
    }
}
