//! Records the calls of sessions for readers of the admin port (`/trace/<seconds>`).
//!
//! ```text
//!   readers of sessions ── note_* ──► queue of each recording ──► its page
//! ```
//!
//! Without a recording, a call costs one atomic read. A recording that does not keep up loses calls, and counts
//! them: sessions never wait for it.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use reprise_agent_core::event::Request;
use reprise_policy::session::Ranks;
use reprise_policy::trace::{Call, Operation};
use reprise_policy::{BlockKey, Layout, SessionId, TenantName};
use tokio::sync::mpsc;

/// Maximum number of recordings at a time.
pub(crate) const RECORDINGS_MAX: usize = 4;

/// Maximum number of calls that wait for one recording: with the longest lists of keys, 32 MiB.
const CALLS_QUEUED_MAX: usize = 256;

/// Passes calls to the recordings.
#[derive(Debug)]
pub(crate) struct Recorder {
    node: String,
    /// Whether there is a recording.
    is_on: AtomicBool,
    recordings: Mutex<Vec<Queue>>,
}

/// Agent's end of a recording.
#[derive(Debug)]
struct Queue {
    calls: mpsc::Sender<Arc<Call>>,
    dropped: Arc<AtomicU64>,
}

/// Reader's end of a recording; dropping it ends the recording.
#[derive(Debug)]
pub(crate) struct Recording {
    pub(crate) calls: mpsc::Receiver<Arc<Call>>,
    dropped: Arc<AtomicU64>,
}

/// Session whose calls are recorded.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Caller<'a> {
    pub(crate) session: SessionId,
    pub(crate) tenant: &'a TenantName,
    pub(crate) layout: &'a Layout,
}

impl Recording {
    /// Returns the number of calls that were lost because the reader was too slow.
    pub(crate) fn dropped(&self) -> u64 {
        self.dropped.load(Ordering::Relaxed)
    }
}

impl Recorder {
    pub(crate) fn new(node: String) -> Recorder {
        Recorder { node, is_on: AtomicBool::new(false), recordings: Mutex::default() }
    }

    /// Returns the name of the agent's node.
    pub(crate) fn node(&self) -> &str {
        &self.node
    }

    /// Starts a recording; `None` if there are [`RECORDINGS_MAX`] already.
    pub(crate) fn start(&self) -> Option<Recording> {
        let mut recordings = self.lock();
        recordings.retain(|queue| !queue.calls.is_closed());
        if recordings.len() >= RECORDINGS_MAX {
            return None;
        }
        let (sender, calls) = mpsc::channel(CALLS_QUEUED_MAX);
        let dropped = Arc::<AtomicU64>::default();
        recordings.push(Queue { calls: sender, dropped: Arc::clone(&dropped) });
        self.is_on.store(true, Ordering::Relaxed);
        Some(Recording { calls, dropped })
    }

    /// Records a request of a session, if there is a recording and the request names blocks.
    pub(crate) fn note(&self, caller: Caller<'_>, request: &Request) {
        if self.is_on.load(Ordering::Relaxed)
            && let Some(call) = self.call(caller, request)
        {
            self.pass(&Arc::new(call));
        }
    }

    fn pass(&self, call: &Arc<Call>) {
        let mut recordings = self.lock();
        recordings.retain(|queue| match queue.calls.try_send(Arc::clone(call)) {
            Ok(()) => true,
            Err(mpsc::error::TrySendError::Full(_)) => {
                queue.dropped.fetch_add(1, Ordering::Relaxed);
                true
            }
            Err(mpsc::error::TrySendError::Closed(_)) => false,
        });
        self.is_on.store(!recordings.is_empty(), Ordering::Relaxed);
    }

    fn call(&self, caller: Caller<'_>, request: &Request) -> Option<Call> {
        let (operation, parent, position, keys) = match request {
            Request::Match { keys, ranks, position, .. } => {
                let parts = match ranks {
                    Ranks::Own => 1,
                    Ranks::All => usize::from(caller.layout.spec().tp_size).max(1),
                };
                (
                    Operation::Match,
                    None,
                    *position,
                    keys.iter().step_by(parts).copied().collect::<Vec<BlockKey>>(),
                )
            }
            Request::Load(load) => (Operation::Load, None, None, load.keys.clone()),
            Request::Commit(commit) => {
                let keys = commit.items.iter().filter_map(|item| item.key).collect();
                (Operation::Save, commit.parent, commit.position, keys)
            }
            _ => return None,
        };
        let since_epoch = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Some(Call {
            operation,
            micros: u64::try_from(since_epoch.as_micros()).unwrap_or(u64::MAX),
            node: self.node.clone(),
            session: caller.session.0,
            tenant: caller.tenant.to_string(),
            block_tokens: caller.layout.tokens(),
            block_bytes: caller.layout.block_bytes(),
            position,
            parent,
            keys,
        })
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Queue>> {
        self.recordings.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use reprise_agent_core::event::{LoadRequest, Scope};
    use reprise_policy::{Dtype, LayoutSpec, Parts};

    use super::*;

    pub(crate) fn layout(tp_size: u16) -> Layout {
        let spec = LayoutSpec {
            layers: 2,
            parts: Parts::KeyValue,
            kv_heads: 1,
            head_dim: 64,
            dtype: Dtype::Bf16,
            tokens_per_block: 16,
            tp_rank: 0,
            tp_size,
        };
        spec.validate().expect("a valid layout")
    }

    fn keys(count: u8) -> Vec<BlockKey> {
        (0..count).map(|number| BlockKey([number; BlockKey::SIZE])).collect()
    }

    fn lookup(ranks: Ranks, count: u8) -> Request {
        Request::Match { keys: keys(count), ranks, scope: Scope::Local, position: Some(0), public: None }
    }

    fn note(recorder: &Recorder, layout: &Layout, request: &Request) {
        let tenant = TenantName::default_tenant();
        recorder.note(Caller { session: SessionId(7), tenant: &tenant, layout }, request);
    }

    #[test]
    fn records_blocks_of_the_first_rank_with_sizes_and_nothing_without_a_recording() {
        let recorder = Recorder::new("n".to_owned());
        note(&recorder, &layout(2), &lookup(Ranks::All, 6));
        let mut recording = recorder.start().expect("the first");
        note(&recorder, &layout(2), &lookup(Ranks::All, 6));
        note(&recorder, &layout(1), &Request::Release { load: reprise_agent_core::effect::LoadId(1) });
        let load = LoadRequest {
            keys: keys(1),
            deadline: std::time::Duration::ZERO,
            read_bytes: 0,
            scope: Scope::Local,
            public: None,
        };
        note(&recorder, &layout(1), &Request::Load(load));
        let call = recording.calls.try_recv().expect("a recorded call");
        assert_eq!((call.operation, call.session, call.block_tokens), (Operation::Match, 7, 16));
        assert_eq!(call.position, Some(0));
        assert_eq!(call.keys, [0, 2, 4].map(|number| BlockKey([number; BlockKey::SIZE])));
        assert_eq!(call.block_bytes, layout(2).block_bytes());
        assert_eq!(recording.calls.try_recv().expect("a recorded call").operation, Operation::Load);
        assert!(recording.calls.try_recv().is_err(), "a release names no blocks");
    }

    #[test]
    fn a_slow_reader_loses_calls_and_a_dropped_one_frees_its_place() {
        let recorder = Recorder::new("n".to_owned());
        let mut slow = recorder.start().expect("the first");
        for _ in 0..CALLS_QUEUED_MAX + 3 {
            note(&recorder, &layout(1), &lookup(Ranks::Own, 1));
        }
        assert_eq!(slow.dropped(), 3);
        let mut received = 0;
        while slow.calls.try_recv().is_ok() {
            received += 1;
        }
        assert_eq!(received, CALLS_QUEUED_MAX);
        let others: Vec<Recording> =
            (1..RECORDINGS_MAX).map(|_| recorder.start().expect("a place")).collect();
        assert!(recorder.start().is_none());
        drop((slow, others));
        note(&recorder, &layout(1), &lookup(Ranks::Own, 1));
        assert!(!recorder.is_on.load(Ordering::Relaxed));
        assert!(recorder.start().is_some());
    }
}
