//! Contents of a node's reports, and which replies it applies.

use std::collections::BTreeSet;

use reprise_agent_core::event::Move as Given;
use reprise_agent_core::{NodeUsage, TenantBlocks, TenantCounts, TenantUsage};
use reprise_policy::block_command::RetentionUsage;
use reprise_policy::quota::{Quota, QuotaUsage};
use reprise_policy::shards::{MemberName, ShardMap};
use reprise_policy::{DrainProgress, TenantName};
use reprise_proto::controlplane::{
    Bytes, MemberInfo, MemberList, Move, ReportReply, TenantOrder, TenantReport,
};

use super::fake::State;
use super::*;

fn tenant() -> TenantName {
    "team-a".parse().expect("a name")
}

/// State of a node with 100 bytes of DRAM and 1,000 of NVMe, partly used by the tenant.
fn own_state(agent: &Agent, grant: Option<Grant>) -> OwnState {
    let number = agent.client.shared.settings.tenants.lock().expect("free").enter(&tenant(), None);
    let holding = |used| QuotaUsage { quota: Quota::UNLIMITED, used };
    let usage = TenantUsage {
        tenant: number.expect("room"),
        grant,
        dram: holding(10),
        nvme: holding(20),
        blocks: TenantBlocks { dram: 1, nvme: 2 },
        counts: TenantCounts::default(),
        retention: RetentionUsage::default(),
    };
    let room = NodeUsage { dram_capacity: 100, nvme_capacity: 1000, ..NodeUsage::default() };
    let drain = DrainProgress { walked_blocks: 3, nowhere_blocks: 1, ..DrainProgress::default() };
    OwnState { usage: room, drain, tenants: vec![usage], session_tenants: BTreeSet::from([tenant()]) }
}

fn order(version: u64) -> ReportReply {
    let (reserved, limit) = (Bytes { dram: 1, nvme: 2 }, Bytes { dram: 30, nvme: 40 });
    let order =
        TenantOrder { tenant: "team-a".to_owned(), version, reserved: Some(reserved), limit: Some(limit) };
    ReportReply { orders: vec![order], ..ReportReply::default() }
}

fn last_report(fake: &Fake) -> TenantReport {
    fake.wait(|state| state.reports.last().is_some_and(|report| !report.tenants.is_empty()));
    fake.read(|state| state.reports.last().expect("a report").tenants[0].clone())
}

#[test]
fn node_reports_its_tenants_and_applies_orders_from_replies() {
    let fake = Fake::start_with(0, State { report_reply: order(7), ..State::default() });
    let agent = Agent::start(settings(fake.endpoint()));
    agent.client.set_own_state(own_state(&agent, None));
    let report = last_report(&fake);
    assert_eq!((report.tenant.as_str(), report.version, report.elsewhere), ("team-a", 0, false));
    assert_eq!(
        report.limit,
        Some(Bytes { dram: 100, nvme: 1000 }),
        "the limit is bounded by the capacity of the node"
    );
    assert_eq!(report.used, Some(Bytes { dram: 10, nvme: 20 }));
    assert_eq!(report.blocks.map(|blocks| (blocks.dram, blocks.nvme)), Some((1, 2)));
    let drain =
        fake.read(|state| state.reports.last().and_then(|report| report.drain)).expect("a reported drain");
    assert_eq!((drain.walked_blocks, drain.nowhere_blocks, drain.drained), (3, 1, false));
    let quota = |reserved, limit| Quota::new(reserved, limit).expect("not above the limit");
    let grant = Grant { tenant: tenant().number(), version: 7, dram: quota(1, 30), nvme: quota(2, 40) };
    agent.wait_for(&DirectoryEvent::Budget(grant));

    agent.client.set_own_state(own_state(&agent, Some(grant)));
    fake.wait(|state| state.reports.last().is_some_and(|report| report.tenants[0].version == 7));
    assert_eq!(last_report(&fake).limit, Some(Bytes { dram: 30, nvme: 40 }));
}

#[test]
fn order_without_a_limit_ends_the_budget() {
    let mut reply = order(9);
    (reply.orders[0].reserved, reply.orders[0].limit) = (None, None);
    let fake = Fake::start_with(0, State { report_reply: reply, ..State::default() });
    let agent = Agent::start(settings(fake.endpoint()));
    agent.client.set_own_state(own_state(&agent, None));
    let unlimited = Quota::UNLIMITED;
    let grant = Grant { tenant: tenant().number(), version: 9, dram: unlimited, nvme: unlimited };
    agent.wait_for(&DirectoryEvent::Budget(grant));
}

#[test]
fn member_without_the_tenants_slot_gets_its_name_only_and_its_orders_are_ignored() {
    let fake = Fake::start_with(0, State { report_reply: order(7), ..State::default() });
    // Finds a member name that takes the tenant's slot from 'a'.
    let other = Fake::start();
    let names = (0..100).map(|number| format!("other-{number}"));
    let list = names.map(|name| {
        let one = MemberInfo { name, ..other.info() };
        MemberList { epoch: 5, members: vec![fake.info(), one], answering: "a".to_owned(), registered: true }
    });
    let map = |list: &MemberList| {
        let names = list.members.iter().map(|member| MemberName::new(&member.name).expect("a name"));
        ShardMap::new(Epoch(5), names).expect("two names")
    };
    let owner = |list: &MemberList| {
        let map = map(list);
        map.owner(tenant().hash_slot()).map(|owner| map.members()[usize::from(owner.0)].to_string())
    };
    let list =
        list.into_iter().find(|list| owner(list).as_deref() != Some("a")).expect("half of the names do");
    fake.change_members(&list, SlotSet::ALL);
    let agent = Agent::start(settings(fake.endpoint()));
    agent.client.set_own_state(own_state(&agent, None));
    let report = last_report(&fake);
    assert!(report.elsewhere && report.limit.is_none(), "{report:?}");
    let digest = fake.read(|state| state.reports.last().expect("a report").map_digest);
    assert_eq!(digest, map(&list).digest(), "the report is based on this map");
    fake.wait(|state| state.reports.len() >= 3);
    let budgets = agent.events.try_iter().filter(|event| matches!(event, DirectoryEvent::Budget(_)));
    assert_eq!(budgets.count(), 0);
}

#[test]
fn modes_are_applied_in_the_order_of_the_store_and_moves_as_they_change() {
    let reply = |mode: NodeMode, mode_revision, given| ReportReply {
        mode: mode.into(),
        mode_revision,
        r#move: given,
        ..ReportReply::default()
    };
    let given = Some(Move { to: 4, bytes: 99 });
    let report_reply = reply(NodeMode::Draining, 8, given);
    let fake = Fake::start_with(0, State { report_reply, ..State::default() });
    let agent = Agent::start(settings(fake.endpoint()));
    agent.client.set_own_state(OwnState::default());
    agent.wait_for(&DirectoryEvent::Mode { mode: NodeMode::Draining, number: 1 });
    for _ in 0..3 {
        agent.wait_for(&DirectoryEvent::Move(Some(Given { to: NodeId(4), bytes: 99 })));
    }
    fake.write(|state| state.report_reply = reply(NodeMode::Active, 7, None));
    agent.wait_for(&DirectoryEvent::Move(None));
    fake.write(|state| state.report_reply = reply(NodeMode::Active, 9, None));
    let next = std::iter::from_fn(|| Some(agent.next()));
    let mut modes = next.filter(|event| matches!(event, DirectoryEvent::Mode { .. }));
    assert_eq!(modes.next(), Some(DirectoryEvent::Mode { mode: NodeMode::Active, number: 2 }));
}
