//! The table in the documents, and answers for single callers.

use std::collections::BTreeSet;
use std::fmt::Write;

use super::*;

const DOCUMENT: &str = include_str!("../../../docs/SECURITY.md");

fn agent(node: &str) -> Identity {
    Identity::new("test", Role::Agent(node.to_owned())).expect("a valid name")
}

fn of_role(role: Role) -> Identity {
    Identity::new("test", role).expect("a valid name")
}

/// The table as the document shows it.
fn markdown() -> String {
    let roles = [Role::Agent("n".to_owned()), Role::Member, Role::Operator, Role::Admin, Role::Console];
    let mut text =
        "| call | agent | member | operator | admin | console |\n|---|---|---|---|---|---|\n".to_owned();
    for call in Call::ALL {
        write!(text, "| {} |", call.action()).expect("memory");
        for role in &roles {
            text.push_str(match decide(role, call) {
                Decision::Allowed => " yes |",
                Decision::ItselfOnly => " its node |",
                Decision::Refused => " |",
            });
        }
        text.push('\n');
    }
    text
}

#[test]
fn the_document_shows_the_table() {
    let table = markdown();
    assert!(DOCUMENT.contains(&table), "docs/SECURITY.md has another table than:\n{table}");
}

#[test]
fn every_call_is_listed_once_and_every_method_is_found_by_its_path() {
    let listed: BTreeSet<&str> = Call::ALL.map(Call::action).into();
    assert_eq!(listed.len(), Call::ALL.len());
    for call in Call::ALL {
        if let Some((service, method)) = call.grpc_method() {
            assert_eq!(Call::of_grpc(&format!("/reprise.controlplane.v2.{service}/{method}")), Some(call));
        }
    }
    for path in ["", "/", "/Register", "/Membership/Register", "/a.Membership/Other", "a.Membership/Register"]
    {
        assert_eq!(Call::of_grpc(path), None, "{path}");
    }
}

#[test]
fn an_agent_acts_for_its_own_node_only() {
    let caller = agent("node-1");
    for call in [Call::Register, Call::Heartbeat, Call::Update, Call::Report, Call::Place, Call::Slots] {
        assert_eq!(authorise(Some(&caller), call), Ok(Grant::Node("node-1")));
        assert_eq!(authorise_for(Some(&caller), call, "node-1"), Ok(()));
        let refusal = authorise_for(Some(&caller), call, "node-2").expect_err("another node").to_string();
        assert!(refusal.contains("agent/node-1") && refusal.contains("agent/node-2"), "{refusal}");
    }
    assert_eq!(authorise_for(Some(&caller), Call::Lookup, "node-2"), Ok(()), "look-ups act for no node");
}

#[test]
fn etcd_may_call_nothing() {
    for call in Call::ALL {
        assert_eq!(decide(&Role::Etcd, call), Decision::Refused, "{call:?}");
    }
}

#[test]
fn refusals_name_the_roles_that_may_do_it() {
    let refusal = authorise(Some(&agent("node-1")), Call::SetTenant).expect_err("refused").to_string();
    assert_eq!(
        refusal,
        "reprise://test/agent/node-1 may not set budgets of tenants: use a certificate of operator or admin"
    );
    let refusal = authorise(Some(&of_role(Role::Admin)), Call::Register).expect_err("refused").to_string();
    assert!(refusal.ends_with("use a certificate of agent/NODE"), "{refusal}");
    for call in Call::ALL {
        assert_ne!(roles_of(call), "", "{call:?}");
    }
}

#[test]
fn a_plain_connection_may_do_all() {
    for call in Call::ALL {
        assert_eq!(authorise(None, call), Ok(Grant::All));
        assert_eq!(authorise_for(None, call, "node-1"), Ok(()));
    }
}
