//! The agent's side of a session: a script that runs on a thread of the test.
//!
//! A script receives requests one by one and sends the answers that the test needs, valid or invalid. Its
//! panics (an unexpected request, a failed assertion) are propagated by [`FakeAgent::join`].

use std::io::{Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::thread::JoinHandle;
use std::time::Duration;

use bytes::Bytes;
use prost::Message;
use reprise_buffers::{
    Arena, ArenaConfig, HugePolicy, PROGRESS_ENTRIES, PROGRESS_ENTRY_BYTES, ProgressWriter, crc32c,
    send_with_fds,
};
use reprise_client::{Client, ConnectOptions};
use reprise_policy::{BlockKey, Layout, LayoutSpec, NamespaceDigest};
use reprise_proto::local::{self, Request, Response, request, response};

/// Longer than any operation of these tests takes, unless it hangs.
pub(crate) const LONG: Duration = Duration::from_secs(60);

/// Timeout of a client whose agent stays silent; long enough for an agent that answers on a busy machine.
pub(crate) const SHORT: Duration = Duration::from_millis(250);

/// Two layers of two parts of 2,304 bytes: blocks of 9,216 bytes in slots of 12,288, so that there is
/// padding.
pub(crate) fn layout() -> Layout {
    LayoutSpec { layers: 2, kv_heads: 1, head_dim: 72, tokens_per_block: 16, ..LayoutSpec::LLAMA_3_8B }
        .validate()
        .expect("a valid layout")
}

pub(crate) fn key(number: u8) -> BlockKey {
    BlockKey([number; 16])
}

/// An agent that runs scripts, one for each session.
pub(crate) struct FakeAgent {
    directory: tempfile::TempDir,
    thread: JoinHandle<()>,
}

/// Script of an agent for one session.
pub(crate) type Script = Box<dyn FnOnce(&mut Peer) + Send>;

/// The agent's end of the session.
pub(crate) struct Peer {
    pub(crate) socket: UnixStream,
    pub(crate) arena: Arena,
    pub(crate) progress: ProgressWriter,
}

impl FakeAgent {
    /// Accepts one session and runs the script; the session is closed when the script returns.
    pub(crate) fn start(script: impl FnOnce(&mut Peer) + Send + 'static) -> FakeAgent {
        FakeAgent::start_in_sequence(vec![Box::new(script)])
    }

    /// Accepts one session, answers its greeting, and runs the script.
    pub(crate) fn serve(script: impl FnOnce(&mut Peer) + Send + 'static) -> FakeAgent {
        FakeAgent::start(|peer| {
            peer.greet();
            script(peer);
        })
    }

    /// Accepts a session for each script, one after the other, like an agent that is restarted.
    pub(crate) fn start_in_sequence(scripts: Vec<Script>) -> FakeAgent {
        let directory = tempfile::tempdir().expect("a directory for the socket");
        let listener = UnixListener::bind(directory.path().join("agent")).expect("a socket");
        let play = move |script: Script| {
            let config = ArenaConfig { bytes: 4 << 20, region_bytes: 4 << 20, huge: HugePolicy::Never };
            let arena = Arena::new(&config).expect("a small arena");
            let progress = ProgressWriter::create().expect("a progress page");
            let (socket, _) = listener.accept().expect("a session");
            script(&mut Peer { socket, arena, progress });
        };
        let thread = std::thread::spawn(move || scripts.into_iter().for_each(play));
        FakeAgent { directory, thread }
    }

    pub(crate) fn socket(&self) -> PathBuf {
        self.directory.path().join("agent")
    }

    pub(crate) fn options(&self) -> ConnectOptions {
        options(&self.socket())
    }

    pub(crate) fn connect(&self) -> Client {
        Client::connect(self.options()).expect("a session")
    }

    /// Drops what holds the session, waits for the script's end, and propagates its panic.
    pub(crate) fn end<T>(self, client: T) {
        drop(client);
        self.join();
    }

    /// Waits for the script's end and propagates its panic.
    pub(crate) fn join(self) {
        if let Err(panic) = self.thread.join() {
            std::panic::resume_unwind(panic);
        }
    }
}

pub(crate) fn options(socket: &Path) -> ConnectOptions {
    ConnectOptions::new(socket, NamespaceDigest([7; 32]), layout()).call_timeout(LONG)
}

impl Peer {
    /// Receives the next request; `None` when the client has closed.
    pub(crate) fn receive(&mut self) -> Option<(u64, request::Body)> {
        let frame = self.receive_raw()?;
        let request = Request::decode(frame.as_slice()).expect("a request");
        Some((request.id, request.body.expect("a known kind of request")))
    }

    /// Receives the request whose first byte the caller has received.
    pub(crate) fn receive_after(&mut self, first: u8) -> Option<(u64, request::Body)> {
        let frame = self.receive_rest([first, 0, 0, 0], 1)?;
        let request = Request::decode(frame.as_slice()).expect("a request");
        Some((request.id, request.body.expect("a known kind of request")))
    }

    /// Receives the bytes of the next request.
    pub(crate) fn receive_raw(&mut self) -> Option<Vec<u8>> {
        self.receive_rest([0; 4], 0)
    }

    /// Receives a request after the first bytes of its length.
    fn receive_rest(&mut self, mut length: [u8; 4], received: usize) -> Option<Vec<u8>> {
        self.socket.read_exact(&mut length[received..]).ok()?;
        let mut frame = vec![0; u32::from_le_bytes(length) as usize];
        self.socket.read_exact(&mut frame).expect("a whole frame");
        Some(frame)
    }

    pub(crate) fn expect(&mut self, what: &str) -> (u64, request::Body) {
        self.receive().unwrap_or_else(|| panic!("the client closed instead of sending {what}"))
    }

    pub(crate) fn reply(&mut self, id: u64, body: response::Body) {
        self.reply_with(id, body, &[]);
    }

    pub(crate) fn reply_with(&self, id: u64, body: response::Body, fds: &[BorrowedFd<'_>]) {
        let message = Response { id, body: Some(body) }.encode_to_vec();
        let mut frame = (message.len() as u32).to_le_bytes().to_vec();
        frame.extend_from_slice(&message);
        // The test checks a client that has disconnected, not the script.
        let _ = send_with_fds(self.socket.as_fd(), &frame, fds);
    }

    pub(crate) fn send_raw(&mut self, bytes: &[u8]) {
        self.socket.write_all(bytes).expect("the client reads");
    }

    /// Receives the greeting and answers it.
    pub(crate) fn greet(&mut self) -> local::Hello {
        let (id, body) = self.expect("hello");
        let request::Body::Hello(hello) = body else { panic!("expected hello, got {body:?}") };
        let salt: &[u8] = if hello.tenant == "default" { &[] } else { &[5; 32] };
        let welcome = local::Welcome {
            session: 1,
            node: "node-a".into(),
            agent_version: "test".into(),
            progress_entries: u32::from(PROGRESS_ENTRIES),
            progress_entry_bytes: PROGRESS_ENTRY_BYTES as u32,
            tenant_salt: salt.to_vec().into(),
            public_tenant: String::new(),
        };
        self.reply_with(id, response::Body::Welcome(welcome), &[self.progress.readonly_fd()]);
        hello
    }

    pub(crate) fn expect_load(&mut self) -> (u64, Vec<BlockKey>) {
        match self.expect("load") {
            (id, request::Body::Load(load)) => (id, BlockKey::unpack(&load.keys).expect("whole keys")),
            (_, other) => panic!("expected load, got {other:?}"),
        }
    }

    pub(crate) fn expect_match(&mut self) -> (u64, usize) {
        match self.expect("match") {
            (id, request::Body::Match(asked)) => (id, asked.keys.len() / BlockKey::SIZE),
            (_, other) => panic!("expected match, got {other:?}"),
        }
    }

    pub(crate) fn expect_reserve(&mut self) -> (u64, u32) {
        match self.expect("reserve") {
            (id, request::Body::Reserve(reserve)) => (id, reserve.count),
            (_, other) => panic!("expected reserve, got {other:?}"),
        }
    }

    pub(crate) fn expect_commit(&mut self) -> (u64, local::Commit) {
        match self.expect("commit") {
            (id, request::Body::Commit(commit)) => (id, commit),
            (_, other) => panic!("expected commit, got {other:?}"),
        }
    }

    pub(crate) fn expect_stats(&mut self) -> u64 {
        match self.expect("stats") {
            (id, request::Body::Stats(_)) => id,
            (_, other) => panic!("expected stats, got {other:?}"),
        }
    }

    /// Returns load and blocks of a corruption report.
    pub(crate) fn expect_suspect(&mut self) -> (u64, Vec<u32>) {
        match self.expect("suspect") {
            (_, request::Body::Suspect(suspect)) => (suspect.load, suspect.blocks),
            (_, other) => panic!("expected suspect, got {other:?}"),
        }
    }

    pub(crate) fn expect_release(&mut self) -> u64 {
        match self.expect("release") {
            (_, request::Body::Release(release)) => release.load,
            (_, other) => panic!("expected release, got {other:?}"),
        }
    }

    pub(crate) fn reply_matched(&mut self, id: u64, blocks: usize) {
        self.reply(id, response::Body::Matched(local::Matched { sources: Bytes::from(vec![1; blocks]) }));
    }

    pub(crate) fn reply_stats(&mut self, id: u64) {
        self.reply(id, response::Body::Stats(local::StatsReply::default()));
    }

    pub(crate) fn reply_committed(&mut self, id: u64, ticket: u64, statuses: &[local::CommitStatus]) {
        let statuses = statuses.iter().map(|status| *status as i32).collect();
        self.reply(id, response::Body::Committed(local::Committed { ticket, statuses }));
    }

    /// Grants the region with the given access, together with a reply.
    pub(crate) fn grant(&self, writable: bool) -> local::RegionGrant {
        local::RegionGrant { region: 0, bytes: self.arena.regions()[0].bytes(), writable }
    }

    /// Answers a reserve with leases 1, 2, … on consecutive slots. `grant`: the first answer of the session.
    pub(crate) fn reply_reserved(&mut self, id: u64, leases: u32, grant: Grant) {
        let slot = layout().slot_bytes();
        let leases = (0..u64::from(leases))
            .map(|index| local::Lease { lease: index + 1, place: Some(place(index * slot)) })
            .collect();
        let regions = if grant == Grant::First { vec![self.grant(true)] } else { vec![] };
        let reserved = local::Reserved { regions, leases, retry_after_us: 1000, devices: Vec::new() };
        let region = &self.arena.regions()[0];
        let fds = [region.writable_fd()];
        let fds: &[BorrowedFd<'_>] = if grant == Grant::First { &fds } else { &[] };
        self.reply_with(id, response::Body::Reserved(reserved), fds);
    }

    /// Receives a reserve and answers it with this number of slots.
    pub(crate) fn give_slots(&mut self, leases: u32, grant: Grant) {
        let (id, _) = self.expect_reserve();
        self.reply_reserved(id, leases, grant);
    }

    /// Receives a commit of one block and answers it.
    pub(crate) fn accept_commit(&mut self, ticket: u64) {
        let (id, _) = self.expect_commit();
        self.reply_committed(id, ticket, &[local::CommitStatus::Committed]);
    }

    /// Receives a match and finds all its blocks.
    pub(crate) fn serve_match(&mut self) {
        let (id, blocks) = self.expect_match();
        self.reply_matched(id, blocks);
    }

    /// Receives a load and answers it with blocks 0, 1, … all of whose layers are ready.
    pub(crate) fn serve_load(&mut self, answer: Answer, blocks: usize) {
        let (id, _) = self.expect_load();
        self.reply_loaded_whole(id, answer, blocks);
    }

    /// Begins the progress of a load with this number of ready layers.
    pub(crate) fn layers_ready(&mut self, entry: u16, load: u64, layers: u32) {
        self.progress.begin(entry, load);
        self.progress.set_layers(entry, layers);
    }

    /// Begins and ends the progress of a load, all of whose layers are ready.
    pub(crate) fn all_layers_ready(&mut self, entry: u16, load: u64) {
        self.layers_ready(entry, load, layout().layers());
        self.progress.done(entry);
    }

    /// Writes block number `number` into its slot and describes it.
    pub(crate) fn place_block(&self, number: u8) -> local::LoadedBlock {
        let bytes = block_bytes(number);
        let offset = u64::from(number) * layout().slot_bytes();
        let span = self.arena.span(0, offset, bytes.len() as u64).expect("a slot of the region");
        span.copy_in(&bytes).expect("writable");
        let checksums: Vec<u8> = bytes
            .chunks(layout().object_bytes() as usize)
            .flat_map(|object| crc32c(object).to_le_bytes())
            .collect();
        local::LoadedBlock {
            status: local::BlockStatus::BlockOk as i32,
            source: 1,
            place: Some(place(offset)),
            checksums: checksums.into(),
        }
    }

    /// Answers a load; the caller must have begun its progress entry.
    pub(crate) fn reply_loaded(&mut self, id: u64, answer: Answer, blocks: Vec<local::LoadedBlock>) {
        let regions = if answer.grant == Grant::First { vec![self.grant(false)] } else { vec![] };
        let loaded =
            local::Loaded { load: answer.load, progress_entry: u32::from(answer.entry), regions, blocks };
        let region = &self.arena.regions()[0];
        let fds = [region.readonly_fd()];
        let fds: &[BorrowedFd<'_>] = if answer.grant == Grant::First { &fds } else { &[] };
        self.reply_with(id, response::Body::Loaded(loaded), fds);
    }

    /// Answers a load with blocks 0, 1, … all of whose layers are ready.
    pub(crate) fn reply_loaded_whole(&mut self, id: u64, answer: Answer, blocks: usize) {
        self.all_layers_ready(answer.entry, answer.load);
        let blocks = (0..blocks as u8).map(|number| self.place_block(number)).collect();
        self.reply_loaded(id, answer, blocks);
    }
}

/// Whether a reply carries the region's descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Grant {
    First,
    Known,
}

/// Number and progress entry of a load's answer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Answer {
    pub(crate) load: u64,
    pub(crate) entry: u16,
    pub(crate) grant: Grant,
}

pub(crate) fn place(offset: u64) -> local::Place {
    local::Place { region: 0, offset, extent: None }
}

/// Returns the bytes of block number `number`.
pub(crate) fn block_bytes(number: u8) -> Vec<u8> {
    (0..layout().block_bytes()).map(|at| (at % 251) as u8 ^ number).collect()
}

/// Returns a block of a load that was not placed.
pub(crate) fn missed(status: local::BlockStatus) -> local::LoadedBlock {
    local::LoadedBlock { status: status as i32, ..local::LoadedBlock::default() }
}
