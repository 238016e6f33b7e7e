//! Reports of an agent to the members: how full its node is and how busy, about once a second to each.
//!
//! As `node-agent/src/directory/reporting.rs`. What is reported is what the core last said of itself, which
//! `node-agent/src/core_loop.rs` has it do once a second: a report is up to two seconds old when it arrives.

use std::time::Duration;

use reprise_agent_core::agent::NodeUsage;
use reprise_controlplane_core::{Amounts, NodeReport};
use reprise_policy::placement::DrainProgress;
use reprise_policy::{Epoch, Tick};

use crate::link::{LinkCall, LinkId};
use crate::messages::{Direction, NodeSays, Request};
use crate::network::Host;
use crate::world::{Local, World};

/// As `core_loop.rs`: pause between two looks of a core at itself.
const TELL_EVERY: Duration = Duration::from_secs(1);
/// Pause between two reports to a member, and the time for the answer to one.
const REPORT_EVERY: Duration = Duration::from_secs(1);
const REPORT_TIMEOUT: Duration = Duration::from_secs(1);

/// What a core last said of itself.
#[derive(Clone, Debug, Default)]
pub(crate) struct OwnState {
    pub(crate) usage: NodeUsage,
    pub(crate) drain: DrainProgress,
}

/// Where a link is between two reports.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Reporting {
    /// When the last one was due.
    due: Tick,
    /// It was due while the node was not registered.
    waits: bool,
}

impl OwnState {
    /// As a member is told.
    pub(crate) fn report(&self) -> NodeReport {
        let NodeUsage { dram_capacity, dram_used, nvme_capacity, nvme_used, queued_bytes } = self.usage;
        NodeReport {
            capacity: Amounts { dram: dram_capacity, nvme: nvme_capacity },
            used: Amounts { dram: dram_used, nvme: nvme_used },
            queued_bytes,
            drain: self.drain,
        }
    }
}

impl World {
    /// The core says how it is, and does so again.
    pub(crate) fn tell_state(&mut self, node: usize) {
        let process = self.process(node);
        process.told = OwnState { usage: process.core.node_usage(), drain: process.core.drain_progress() };
        self.later(node, TELL_EVERY, Local::TellState);
    }

    /// Time for a report over a link.
    pub(crate) fn report_due(&mut self, node: usize, id: LinkId) {
        let now = self.time(Host::Node(node));
        let Some(link) = self.client(node).links.get_mut(&id) else { return };
        link.reporting = Reporting { due: now, waits: true };
        self.report_if_due(node, id);
    }

    /// Reports, if that is due and the node is registered.
    pub(crate) fn report_if_due(&mut self, node: usize, id: LinkId) {
        let Some(link) = self.client(node).links.get_mut(&id) else { return };
        let Some(granted) = link.granted.filter(|_| link.reporting.waits) else { return };
        link.reporting.waits = false;
        let says =
            NodeSays { node: granted.node, epoch: granted.epoch, report: self.process(node).told.report() };
        let of = LinkCall::Report { epoch: granted.epoch };
        self.call_member(node, id, of, (Request::Report(Box::new(says)), REPORT_TIMEOUT));
    }

    /// A member has answered a report of a registration.
    pub(crate) fn reported(&mut self, node: usize, id: LinkId, epoch: Epoch, direction: Option<Direction>) {
        let granted = self.client(node).links.get(&id).and_then(|link| link.granted);
        // Where it is fenced, beats or updates say so as well, and register again.
        let direction = direction.filter(|_| granted.is_some_and(|granted| granted.epoch == epoch));
        if let Some(direction) = direction {
            self.count("reports");
            self.directed(node, (id, epoch), direction);
        }
        self.report_over(node, id);
    }

    /// A report has come to its end, with or without an answer.
    pub(crate) fn report_over(&mut self, node: usize, id: LinkId) {
        let now = self.time(Host::Node(node));
        let Some(link) = self.client(node).links.get(&id) else { return };
        let wait = link.reporting.due.after(REPORT_EVERY).since(now);
        self.later(node, wait, Local::Report(id));
    }
}
