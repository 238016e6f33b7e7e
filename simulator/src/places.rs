//! Machines: which process runs on each, whether it is stopped, what its clock shows; and the connections between them.
//!
//! A process that is stopped does what came meanwhile when it goes on, in the order in which it came.

use std::time::Duration;

use reprise_policy::Tick;

use crate::clock::{Clock, Stopped};
use crate::messages::Message;
use crate::network::{End, Host, LineId};
use crate::world::{Action, World};

/// A machine.
#[derive(Debug)]
pub(crate) struct Place {
    /// Which process of this machine runs, or ran last.
    pub(crate) life: u64,
    /// A process runs.
    pub(crate) runs: bool,
    /// The machine is on.
    pub(crate) powered: bool,
    /// Of the process.
    pub(crate) clock: Clock,
    /// The process is stopped since then.
    pub(crate) paused: Option<Tick>,
    /// What came while it was stopped.
    deferred: Vec<Action>,
    /// Deadlines that passed before then, by its clock, could not be kept: the process was stopped.
    pub(crate) resumed: Tick,
    /// Its clock stood still for a while, and showed this when it went on.
    pub(crate) stood: Option<Tick>,
}

/// All machines, by host.
#[derive(Debug)]
pub(crate) struct Places {
    places: Vec<Place>,
    nodes: usize,
}

impl Places {
    pub(crate) fn new(nodes: usize, members: usize, clock: Clock) -> Places {
        let place = || Place {
            life: 0,
            runs: false,
            powered: true,
            clock,
            paused: None,
            deferred: Vec::new(),
            resumed: Tick(0),
            stood: None,
        };
        Places { places: std::iter::repeat_with(place).take(nodes + members + 1).collect(), nodes }
    }

    fn index(&self, host: Host) -> usize {
        match host {
            Host::Node(node) => node,
            Host::Member(member) => self.nodes + member,
            Host::Store => self.places.len() - 1,
        }
    }

    pub(crate) fn hosts(&self) -> Vec<Host> {
        let members = self.places.len() - 1 - self.nodes;
        let nodes = (0..self.nodes).map(Host::Node);
        nodes.chain((0..members).map(Host::Member)).chain([Host::Store]).collect()
    }
}

impl World {
    pub(crate) fn place(&self, host: Host) -> &Place {
        &self.places.places[self.places.index(host)]
    }

    pub(crate) fn place_mut(&mut self, host: Host) -> &mut Place {
        let index = self.places.index(host);
        &mut self.places.places[index]
    }

    pub(crate) fn runs(&self, host: Host) -> bool {
        self.place(host).runs
    }

    /// Whether a process runs and is not stopped.
    pub(crate) fn is_awake(&self, host: Host) -> bool {
        let place = self.place(host);
        place.runs && place.paused.is_none()
    }

    /// What a process's clock shows.
    pub(crate) fn time(&self, host: Host) -> Tick {
        self.place(host).clock.at(self.now)
    }

    /// When a process's clock shows something, and not before now.
    pub(crate) fn when(&self, host: Host, shown: Tick) -> Tick {
        self.place(host).clock.when(shown).max(self.now)
    }

    /// When a time has passed by a process's clock.
    pub(crate) fn in_time(&self, host: Host, delay: Duration) -> Tick {
        self.when(host, self.time(host).after(delay))
    }

    /// A process begins; returns its life.
    pub(crate) fn begin_process(&mut self, host: Host) -> u64 {
        let clock = Clock::draw(self.now, &mut self.rng);
        let place = self.place_mut(host);
        place.life += 1;
        (place.runs, place.powered, place.paused, place.clock) = (true, true, None, clock);
        (place.resumed, place.stood) = (Tick(0), None);
        place.life
    }

    /// A process is gone.
    pub(crate) fn end_process(&mut self, host: Host) {
        let place = self.place_mut(host);
        (place.runs, place.paused) = (false, None);
        place.deferred.clear();
    }

    /// `SIGSTOP`, or the suspension of the machine.
    pub(crate) fn stop(&mut self, host: Host) {
        let now = self.now;
        self.place_mut(host).paused.get_or_insert(now);
    }

    /// It goes on.
    pub(crate) fn go_on(&mut self, host: Host, how: Stopped) {
        let now = self.now;
        let place = self.place_mut(host);
        let Some(stopped) = place.paused.take() else { return };
        place.clock.wake(stopped, now, how);
        place.resumed = place.clock.at(now);
        match how {
            Stopped::GoesOn => {}
            Stopped::Stands => place.stood = Some(place.resumed),
            Stopped::Jumps(ahead) => self.hasten(host, ahead),
        }
        match (how, host) {
            (Stopped::GoesOn, _) => {}
            (Stopped::Stands, Host::Store) => self.count("store clocks stood still"),
            (Stopped::Stands, _) => self.count("clocks stood still"),
            (Stopped::Jumps(_), Host::Store) => self.count("store clocks jumped"),
            (Stopped::Jumps(_), _) => self.count("clocks jumped"),
        }
        for action in std::mem::take(&mut self.place_mut(host).deferred) {
            self.queue.push(now, action);
        }
        if host == Host::Store {
            self.store_goes_on(how);
        }
    }

    /// A process's clock has jumped: its timers are due sooner. The store sets its own anew.
    fn hasten(&mut self, host: Host, micros: u64) {
        let (now, micros) = (self.now, self.place(host).clock.takes(micros));
        self.queue.advance(|at, action| {
            let of_host = match action {
                Action::Local { node, .. } => host == Host::Node(*node),
                Action::Member { member, .. } => host == Host::Member(*member),
                _ => false,
            };
            if of_host { Tick(at.0.saturating_sub(micros)).max(now) } else { at }
        });
    }

    /// Keeps what is for a stopped process until it goes on.
    pub(crate) fn defer(&mut self, action: Action) -> Option<Action> {
        let host = match &action {
            Action::Deliver { line, to, .. } => self.network.line(*line)?.ends[*to].host,
            Action::LineLost { end, .. } => end.host,
            Action::Local { node, .. } => Host::Node(*node),
            Action::Member { member, .. } => Host::Member(*member),
            Action::Store { .. } => Host::Store,
            _ => return Some(action),
        };
        let place = self.place_mut(host);
        if place.paused.is_some() {
            place.deferred.push(action);
            return None;
        }
        Some(action)
    }

    // ---- connections -------------------------------------------------------------------------------------------

    /// The process that runs on a host now; a host without one has a life that no process ever had.
    pub(crate) fn end(&self, host: Host) -> End {
        let place = self.place(host);
        End { host, life: if place.runs { place.life } else { u64::MAX } }
    }

    pub(crate) fn lives(&self, end: End) -> bool {
        end.life != u64::MAX && self.end(end.host) == end
    }

    /// Whether the other end of a connection is a process that still runs.
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

    /// Sends what was sent before, and held at a cut.
    pub(crate) fn send_again(&mut self, (line, to): (LineId, usize), number: u64, message: Message) {
        if let Some(at) = self.network.arrival(line, to, self.now, &mut self.rng) {
            self.queue.push(at, Action::Deliver { line, to, number, message });
        }
    }

    pub(crate) fn arrive(&mut self, (line, to): (LineId, usize), number: u64, message: Message) {
        let Some(ends) = self.network.line(line).map(|line| line.ends) else { return };
        if self.network.is_cut(ends[0].host, ends[1].host) {
            return self.network.hold(line, to, number, message);
        }
        for message in self.network.in_order(line, to, number, message) {
            self.deliver(line, to, message);
        }
    }

    fn deliver(&mut self, line: LineId, to: usize, message: Message) {
        let Some(ends) = self.network.line(line).map(|line| line.ends) else { return };
        let (receiver, sender) = (ends[to], ends[1 - to]);
        if !self.lives(sender) {
            return;
        }
        if !self.lives(receiver) || !self.listens(receiver.host, to) {
            // A machine that is up refuses; one that is down says nothing.
            if self.place(receiver.host).powered {
                self.lose_end(line, sender, 40..600);
            }
            return;
        }
        match (receiver.host, message) {
            (Host::Member(member), Message::Call { call, request }) => {
                self.serve_call(member, (line, call), request);
            }
            (Host::Node(node), Message::Reply { call, reply }) => self.on_answer(node, call, reply),
            (Host::Node(node), Message::Peer(message)) => self.on_peer_message(node, line, message),
            (Host::Store, Message::Ask { call, question }) => self.keep((line, call), question),
            (Host::Member(member), Message::Told { call, told }) => self.on_told(member, call, told),
            (host, message) => unreachable!("{host:?} is not sent {message:?}"),
        }
    }

    /// Whether a process takes what comes to this end of a connection: it has opened it, or serves.
    fn listens(&self, host: Host, end: usize) -> bool {
        match host {
            Host::Member(member) => end == 0 || self.serves(member),
            Host::Node(_) | Host::Store => true,
        }
    }

    fn lose_end(&mut self, line: LineId, end: End, micros: std::ops::Range<u64>) {
        let delay = self.rng.micros(micros);
        self.after(delay, Action::LineLost { line, end });
    }

    pub(crate) fn line_lost(&mut self, line: LineId, end: End) {
        if !self.lives(end) {
            return;
        }
        self.network.close(line);
        match end.host {
            Host::Node(node) => {
                self.client_line_lost(node, line);
                self.peer_line_lost(node, line);
            }
            Host::Member(member) => self.member_line_lost(member, line),
            Host::Store => self.watchers_lost(line),
        }
    }

    /// The other ends of a host's connections learn that they are gone, where the kernel can still tell them.
    pub(crate) fn break_lines(&mut self, host: Host) {
        for id in self.network.lines_of(host) {
            let ends = self.network.line(id).expect("listed").ends;
            if !self.network.is_cut(ends[0].host, ends[1].host) {
                self.break_line(id);
            }
        }
    }

    /// Both ends of a connection learn that it is gone.
    pub(crate) fn break_line(&mut self, id: LineId) {
        let Some(line) = self.network.line(id) else { return };
        for end in line.ends {
            self.lose_end(id, end, 10..2000);
        }
    }
}
