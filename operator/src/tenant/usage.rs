//! What a tenant holds, and whether that is more than it may.
//!
//! Figures change with every block, and statuses are written through etcd: what is stored stays until it differs by more than a 64th, for a minute
//! at least ([`CHANGED_EVERY`]), and what differs by less for [`REFRESHED_EVERY`]. What is the same is never written again. A change of the spec is
//! answered at once. The time of the figures is in the status, so all this is so also of an operator that has just started.
//!
//! Figures that may be too small are not told: the stored ones stay, and `UsageKnown` says why.

use std::time::Duration;

use futures_util::future::join_all;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::ResourceExt;
use reprise_crds::fields::Quantity;
use reprise_crds::status::{Condition, ConditionStatus, ConditionType as Type, Finding, Reason, find};
use reprise_crds::tenant::TenantUsage;
use reprise_crds::{CacheTenant, CacheTenantStatus};

use super::budget;
use crate::clock;
use crate::cluster::dereference::knows;
use crate::context::Context;
use crate::control_plane::{Holding, LOOK_AGAIN, LOOK_SOON, Room, Unmeasured};
use crate::in_use;
use crate::names::ClusterNames;
use crate::plan::Refusal;

/// Pause between two writes of figures that differ by more than [`SMALLEST_CHANGE`], or of `OverQuota`.
const CHANGED_EVERY: Duration = Duration::from_secs(60);
/// The same, of figures that differ by less.
const REFRESHED_EVERY: Duration = Duration::from_secs(300);
/// Changes up to this part of a figure can wait. Budgets are not moved for less either.
const SMALLEST_CHANGE: u64 = 64;
/// Figures are rounded up to so many bytes.
const UNIT: u64 = 1 << 20;
/// Units at the most: a quantity has 12 digits. That is 950 PiB.
const UNITS_MAX: u64 = 999_999_999_999;

/// What the tenant holds in one cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Measured {
    /// `namespace/name` of the cluster.
    pub cluster: String,
    /// What was found.
    pub held: Result<Holding, Unmeasured>,
}

/// What to say of it.
#[derive(Clone, Debug, PartialEq)]
pub struct Told {
    /// The figures.
    pub usage: Option<TenantUsage>,
    /// What is so.
    pub findings: Vec<Finding>,
    /// When to look again, at the latest.
    pub next: Duration,
}

/// Asks the control planes of all clusters that know the tenant, but of those that go.
pub async fn measure(tenant: &CacheTenant, context: &Context) -> Vec<Measured> {
    let clusters = context.world.clusters.state();
    let stays = clusters.iter().filter(|cluster| !in_use::goes(&***cluster));
    let mut names: Vec<ClusterNames> = stays.map(|cluster| ClusterNames::of(cluster)).collect();
    names.retain(|names| knows(tenant, names));
    names.sort_by_key(ClusterNames::key);
    let name = tenant.name_any();
    let measured = names.iter().map(|names| {
        let name = &name;
        async move {
            let others = context.world.tenants.state_filter(|other| knows(other, names));
            let mut others: Vec<String> = others.iter().map(|other| other.name_any()).collect();
            others.sort_unstable();
            let held = context.control_planes.held(names, name, &others, &context.metrics).await;
            Measured { cluster: names.key(), held }
        }
    });
    join_all(measured).await
}

/// What to say of what was found.
pub fn tell(tenant: &CacheTenant, measured: &[Measured], refused: Option<&Refusal>, now: &Time) -> Told {
    let before = tenant.status.as_ref();
    let stored = before.and_then(|before| before.usage.clone());
    let over = over(tenant, measured, refused);
    if let Some(unknown) = unknown(measured) {
        // An absent control plane is left alone for a time anyway.
        let is_unheard = measured.iter().any(|one| matches!(one.held, Err(Unmeasured::Unheard(_))));
        let next = if is_unheard { LOOK_SOON } else { LOOK_AGAIN };
        let findings = std::iter::once(unknown).chain(over).collect();
        return Told { usage: stored, findings, next };
    }
    let held = || measured.iter().filter_map(|one| one.held.as_ref().ok());
    let mut findings = vec![known(measured, held().map(|held| held.away).sum())];
    let fresh = figures(held(), now);
    let paced = pace(before, tenant.metadata.generation, (&fresh, over.as_ref()), now);
    let (usage, over, next) = match paced {
        Pace::Fresh => (fresh, over, CHANGED_EVERY),
        Pace::Stored { usage, over: was, next } => (usage, was.or(over), next),
    };
    findings.extend(over);
    Told { usage: Some(usage), findings, next }
}

/// Whether what was found is written now.
#[derive(Clone, Debug, PartialEq)]
enum Pace {
    Fresh,
    /// What is stored stays, and is looked at again then.
    Stored {
        usage: TenantUsage,
        over: Option<Finding>,
        next: Duration,
    },
}

fn pace(
    before: Option<&CacheTenantStatus>,
    generation: Option<i64>,
    (fresh, over): (&TenantUsage, Option<&Finding>),
    now: &Time,
) -> Pace {
    let Some((before, usage)) = before.and_then(|before| Some((before, before.usage.as_ref()?))) else {
        return Pace::Fresh;
    };
    let is_answer = generation.unwrap_or_default() != before.observed_generation;
    let was = find(&before.conditions, Type::OverQuota).and_then(finding);
    // What was not known is answered at once, too.
    let was_unknown = was.as_ref().is_none_or(|was| was.status == ConditionStatus::Unknown);
    if is_answer || (was_unknown && over.is_some()) {
        return Pace::Fresh;
    }
    let same_words = was.as_ref() == over;
    let change = if same_words { change(usage, fresh) } else { Change::Large };
    let every = match change {
        Change::Small => REFRESHED_EVERY,
        Change::None | Change::Large => CHANGED_EVERY,
    };
    let passed = clock::between(&usage.observed_time, now);
    if change != Change::None && passed >= every {
        return Pace::Fresh;
    }
    // Others are looked at again all the same: they may change more.
    let rest = every.saturating_sub(passed);
    let next = if change == Change::Large { rest.max(Duration::from_secs(1)) } else { CHANGED_EVERY };
    Pace::Stored { usage: usage.clone(), over: was, next }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Change {
    None,
    Small,
    Large,
}

/// By how much two findings differ, whenever they were made.
fn change(before: &TenantUsage, fresh: &TenantUsage) -> Change {
    // What was stored by somebody else is as good as nothing.
    let bytes = |quantity: &Quantity| quantity.bytes().unwrap_or_default();
    let blocks = |blocks: Option<i64>| blocks.and_then(|blocks| u64::try_from(blocks).ok());
    let pairs = [
        (Some(bytes(&before.dram)), Some(bytes(&fresh.dram))),
        (Some(bytes(&before.ssd)), Some(bytes(&fresh.ssd))),
        (blocks(before.dram_blocks), blocks(fresh.dram_blocks)),
        (blocks(before.ssd_blocks), blocks(fresh.ssd_blocks)),
    ];
    let of = |pair: (Option<u64>, Option<u64>)| match pair {
        (a, b) if a == b => Change::None,
        (Some(a), Some(b)) if a.abs_diff(b) <= a.max(b) / SMALLEST_CHANGE => Change::Small,
        _ => Change::Large,
    };
    pairs.into_iter().map(of).max().unwrap_or(Change::None)
}

/// A condition of ours as it was found.
fn finding(condition: &Condition) -> Option<Finding> {
    let (reason, _) = Reason::MEANINGS.iter().find(|(reason, _)| reason.as_str() == condition.reason)?;
    Some(Finding {
        kind: Type::OverQuota,
        status: condition.status,
        reason: *reason,
        message: condition.message.clone(),
    })
}

fn figures<'a>(held: impl Iterator<Item = &'a Holding>, now: &Time) -> TenantUsage {
    let mut sum = Holding { blocks: Some(Room::default()), ..Holding::default() };
    let plus =
        |a: Room, b: Room| Room { dram: a.dram.saturating_add(b.dram), ssd: a.ssd.saturating_add(b.ssd) };
    for held in held {
        sum.used = plus(sum.used, held.used);
        sum.blocks = sum.blocks.zip(held.blocks).map(|(a, b)| plus(a, b));
    }
    let quantity = |bytes: u64| Quantity::of_bytes(bytes.div_ceil(UNIT).min(UNITS_MAX) * UNIT);
    let blocks = |of: fn(Room) -> u64| sum.blocks.map(|blocks| i64::try_from(of(blocks)).unwrap_or(i64::MAX));
    TenantUsage {
        dram: quantity(sum.used.dram),
        ssd: quantity(sum.used.ssd),
        dram_blocks: blocks(|room| room.dram),
        ssd_blocks: blocks(|room| room.ssd),
        observed_time: now.clone(),
    }
}

fn known(measured: &[Measured], away: u32) -> Finding {
    let clusters: Vec<&str> = measured.iter().map(|one| one.cluster.as_str()).collect();
    let clusters = clusters.join(", ");
    let message = match away {
        0 => format!("all nodes of {clusters} have said what they hold"),
        away => format!(
            "all nodes of {clusters} that are not away have said what they hold; {away} are away and not counted: bring them back, or, if they are \
             gone for good, run reprise forget NODE"
        ),
    };
    Finding::yes(Type::UsageKnown, Reason::AsDesired, message)
}

/// Why nobody can say what the tenant holds, if so.
fn unknown(measured: &[Measured]) -> Option<Finding> {
    let kind = Type::UsageKnown;
    if measured.is_empty() {
        let message = "no KVCacheCluster has the tenant: make one, or correct clusters";
        return Some(Finding::unknown(kind, Reason::ReferenceNotFound, message));
    }
    measured.iter().find_map(|one| {
        let cluster = &one.cluster;
        let (reason, message) = match one.held.as_ref().err()? {
            Unmeasured::Unasked(words) => (
                Reason::ControlPlaneUnreachable,
                format!(
                    "what the tenant holds in {cluster} is not known: {words}. It is asked again; if this stays so, look at the pods of the control plane"
                ),
            ),
            Unmeasured::Unheard(words) => (
                Reason::NotReported,
                format!(
                    "what the tenant holds in {cluster} is not known: {words}. Agents do within seconds of registering; if this stays so, look at \
                     those of these nodes"
                ),
            ),
        };
        Some(Finding::unknown(kind, reason, message))
    })
}

/// Whether the tenant holds more in a cluster than its budget allows. Its words change with spec and clusters only. Nothing of one that is refused,
/// of which control planes have another budget, and of one that is purged, which has to hold nothing.
fn over(tenant: &CacheTenant, measured: &[Measured], refused: Option<&Refusal>) -> Option<Finding> {
    let kind = Type::OverQuota;
    if refused.is_some() || tenant.metadata.deletion_timestamp.is_some() {
        return None;
    }
    let Some(budget) = budget::wanted(tenant) else {
        return Some(Finding::no(kind, Reason::AsDesired, "it has no limit in a cluster"));
    };
    type Of = fn(&Room) -> u64;
    let kinds: [(&str, &str, Of); 2] = [
        ("of memory", "budget.dram.limit", |room| room.dram),
        ("on devices", "budget.ssd.limit", |room| room.ssd),
    ];
    let exceeds = |one: &Measured| {
        let used = &one.held.as_ref().ok()?.used;
        let (room, field, of) = kinds.iter().find(|(.., of)| of(used) > of(&budget.limit))?;
        Some((one.cluster.clone(), *room, *field, of(&budget.limit)))
    };
    if let Some((cluster, room, field, limit)) = measured.iter().find_map(exceeds) {
        let message = format!(
            "it holds more {room} in {cluster} than {field} ({}) allows, and gives way within seconds; blocks that are being read go when they are \
             released. If this stays so, look whether BudgetApplied is true and agents are ready, or raise {field}",
            Quantity::of_bytes(limit)
        );
        return Some(Finding::yes(kind, Reason::AboveLimit, message));
    }
    if measured.is_empty() || measured.iter().any(|one| one.held.is_err()) {
        let message = "what it holds is not known: see UsageKnown";
        return Some(Finding::unknown(kind, Reason::NotReported, message));
    }
    Some(Finding::no(kind, Reason::AsDesired, "it holds no more than its budget allows"))
}

#[cfg(test)]
mod tests;
