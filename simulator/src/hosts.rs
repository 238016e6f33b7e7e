//! Hosts: the process on each host, its pauses and its clock; and the connections between hosts.
//!
//! A stopped process handles the events of its pause when it is resumed, in the order of their arrival.

use std::time::Duration;

use reprise_policy::Tick;

use crate::clock::{Clock, PauseClock};
use crate::environment::Environment;
use crate::messages::Message;
use crate::network::{End, Host, LineId};
use crate::simulation::Action;
use crate::timed;

/// State of a host.
#[derive(Debug)]
pub(crate) struct HostState {
    /// Number of the current or last process of this host.
    pub(crate) life: u64,
    /// Whether a process runs.
    pub(crate) runs: bool,
    /// Whether the machine is on.
    pub(crate) powered: bool,
    /// Clock of the process.
    pub(crate) clock: Clock,
    /// Time since which the process is stopped.
    pub(crate) paused: Option<Tick>,
    /// Events that arrived during the pause.
    deferred: Vec<Action>,
    /// End of the last pause, by the process's clock: earlier deadlines could not be met.
    pub(crate) resumed: Tick,
    /// Value of the process's clock on resume, if the clock had stopped.
    pub(crate) clock_stopped_at: Option<Tick>,
}

/// State of all hosts.
#[derive(Debug)]
pub(crate) struct Hosts {
    states: Vec<HostState>,
    nodes: usize,
}

impl Hosts {
    pub(crate) fn new(nodes: usize, members: usize, clock: Clock) -> Hosts {
        let state = || HostState {
            life: 0,
            runs: false,
            powered: true,
            clock,
            paused: None,
            deferred: Vec::new(),
            resumed: Tick(0),
            clock_stopped_at: None,
        };
        Hosts { states: std::iter::repeat_with(state).take(nodes + members + 1).collect(), nodes }
    }

    fn index(&self, host: Host) -> usize {
        match host {
            Host::Node(node) => node,
            Host::Member(member) => self.nodes + member,
            Host::Store => self.states.len() - 1,
        }
    }

    pub(crate) fn hosts(&self) -> Vec<Host> {
        let members = self.states.len() - 1 - self.nodes;
        let nodes = (0..self.nodes).map(Host::Node);
        nodes.chain((0..members).map(Host::Member)).chain([Host::Store]).collect()
    }
}

impl Environment {
    pub(crate) fn host(&self, host: Host) -> &HostState {
        &self.hosts.states[self.hosts.index(host)]
    }

    pub(crate) fn host_mut(&mut self, host: Host) -> &mut HostState {
        let index = self.hosts.index(host);
        &mut self.hosts.states[index]
    }

    pub(crate) fn runs(&self, host: Host) -> bool {
        self.host(host).runs
    }

    /// Reports whether a process runs and is not stopped.
    pub(crate) fn is_awake(&self, host: Host) -> bool {
        let place = self.host(host);
        place.runs && place.paused.is_none()
    }

    /// Returns the value of a process's clock.
    pub(crate) fn time(&self, host: Host) -> Tick {
        self.host(host).clock.at(self.now)
    }

    /// Returns the instant at which a process's clock shows `shown`, but not before now.
    pub(crate) fn when(&self, host: Host, shown: Tick) -> Tick {
        self.host(host).clock.when(shown).max(self.now)
    }

    /// Returns the instant after a delay by a process's clock.
    pub(crate) fn in_time(&self, host: Host, delay: Duration) -> Tick {
        self.when(host, self.time(host).after(delay))
    }

    /// Starts a process; returns its number.
    pub(crate) fn begin_process(&mut self, host: Host) -> u64 {
        let clock = Clock::draw(self.now, &mut self.rng);
        let place = self.host_mut(host);
        place.life += 1;
        (place.runs, place.powered, place.paused, place.clock) = (true, true, None, clock);
        (place.resumed, place.clock_stopped_at) = (Tick(0), None);
        place.life
    }

    /// Ends the process of a host.
    pub(crate) fn end_process(&mut self, host: Host) {
        let place = self.host_mut(host);
        (place.runs, place.paused) = (false, None);
        place.deferred.clear();
    }

    /// Stops the process: `SIGSTOP`, or the suspension of the machine.
    pub(crate) fn stop(&mut self, host: Host) {
        let now = self.now;
        self.host_mut(host).paused.get_or_insert(now);
    }

    /// Resumes a stopped process, and handles its deferred actions. Reports whether it was stopped.
    pub(crate) fn resume(&mut self, host: Host, how: PauseClock) -> bool {
        let now = self.now;
        let place = self.host_mut(host);
        let Some(stopped) = place.paused.take() else { return false };
        place.clock.wake(stopped, now, how);
        place.resumed = place.clock.at(now);
        match how {
            PauseClock::Runs => {}
            PauseClock::Stops => place.clock_stopped_at = Some(place.resumed),
            PauseClock::Jumps(ahead) => self.advance_timers(host, ahead),
        }
        match (how, host) {
            (PauseClock::Runs, _) => {}
            (PauseClock::Stops, Host::Store) => self.count("store clocks stopped"),
            (PauseClock::Stops, _) => self.count("clocks stopped"),
            (PauseClock::Jumps(_), Host::Store) => self.count("store clocks jumped"),
            (PauseClock::Jumps(_), _) => self.count("clocks jumped"),
        }
        for action in std::mem::take(&mut self.host_mut(host).deferred) {
            self.queue.push(now, action);
        }
        true
    }

    /// Advances the timers of a process whose clock has jumped. The store resets its own timers.
    fn advance_timers(&mut self, host: Host, micros: u64) {
        let (now, micros) = (self.now, self.host(host).clock.takes(micros));
        self.queue.advance(|at, action| {
            let of_host = match action {
                Action::Agent { node, .. } => host == Host::Node(*node),
                Action::Member { member, .. } => host == Host::Member(*member),
                _ => false,
            };
            if of_host { Tick(at.0.saturating_sub(micros)).max(now) } else { at }
        });
    }

    /// Defers the action of a stopped process until its resume.
    pub(crate) fn defer(&mut self, action: Action) -> Option<Action> {
        let host = match &action {
            Action::Deliver { line, to, .. } => self.network.line(*line)?.ends[*to].host,
            Action::LineLost { end, .. } => end.host,
            Action::Agent { node, .. } => Host::Node(*node),
            Action::Member { member, .. } => Host::Member(*member),
            Action::Store { .. } => Host::Store,
            _ => return Some(action),
        };
        let place = self.host_mut(host);
        if place.paused.is_some() {
            place.deferred.push(action);
            return None;
        }
        Some(action)
    }

    /// Returns the current process of a host. For a host without one, the number is one that no process has
    /// had.
    pub(crate) fn end(&self, host: Host) -> End {
        let place = self.host(host);
        End { host, life: if place.runs { place.life } else { u64::MAX } }
    }

    pub(crate) fn lives(&self, end: End) -> bool {
        end.life != u64::MAX && self.end(end.host) == end
    }

    /// Reports whether the other end of a connection is a process that still runs.
    pub(crate) fn far_lives(&self, line: LineId) -> bool {
        self.network.line(line).is_some_and(|line| self.lives(line.ends[1]))
    }

    pub(crate) fn open_line(&mut self, from: Host, to: Host) -> LineId {
        self.network.open(self.end(from), self.end(to))
    }

    /// Sends a message over a connection, to its end with this index.
    pub(crate) fn send(&mut self, line: LineId, to: usize, message: Message) {
        if let Some(number) = self.network.number(line, to) {
            self.send_again((line, to), number, message);
        }
    }

    /// Resends a message that was held at a cut.
    pub(crate) fn send_again(&mut self, (line, to): (LineId, usize), number: u64, message: Message) {
        let arrival = match timed::latency(self, line) {
            Some(latency) => self.network.arrival_after(line, to, self.now.after(latency)),
            None => self.network.arrival(line, to, self.now, &mut self.rng),
        };
        if let Some(at) = arrival {
            self.queue.push(at, Action::Deliver { line, to, number, message });
        }
    }

    pub(crate) fn lose_end(&mut self, line: LineId, end: End, micros: std::ops::Range<u64>) {
        let delay = self.rng.micros(micros);
        self.after(delay, Action::LineLost { line, end });
    }

    /// Notifies the other ends of a host's connections of their end, where the kernel can still do so.
    pub(crate) fn break_lines(&mut self, host: Host) {
        for id in self.network.lines_of(host) {
            let ends = self.network.line(id).expect("listed").ends;
            if !self.network.is_cut(ends[0].host, ends[1].host) {
                self.break_line(id);
            }
        }
    }

    /// Notifies both ends of a connection of its end.
    pub(crate) fn break_line(&mut self, id: LineId) {
        let Some(line) = self.network.line(id) else { return };
        for end in line.ends {
            self.lose_end(id, end, 10..2000);
        }
    }
}
