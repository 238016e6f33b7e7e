//! Hints: checks, and their effect on the requests of a session.

use std::time::Duration;

use reprise_policy::prefetch::{
    CONFIDENCE_MAX, HINT_VERSION, ITERATION_MAX, ITERATION_WINDOW, Lookahead, LookaheadRequest,
};
use reprise_policy::{BlockKey, SessionId, Tick};

use crate::cache::{AheadCopy, Cache, RankClasses};
use crate::context::{Caller, Context};
use crate::limits::{
    LOOKAHEAD_GRACE_MAX, LOOKAHEAD_GRACE_MIN, LOOKAHEAD_KEYS_MAX, LOOKAHEAD_REQUESTS_MAX,
    LOOKAHEAD_TRACKED_MAX,
};
use crate::prefetch::Prefetch;
use crate::prefetch::requests::{Hinted, ListedBlock, Phase, Wanted};

/// Checks the parts of a hint without which its rest has no meaning.
pub(super) fn check(lookahead: &Lookahead, ranks: usize) -> Result<(), String> {
    let Lookahead { version, requests, cancelled, begun, .. } = lookahead;
    let begun = begun.as_deref().unwrap_or_default();
    if *version != HINT_VERSION {
        return Err(format!("lookahead: unknown version {version}: expected {HINT_VERSION}"));
    }
    let count = requests.len().max(cancelled.len()).max(begun.len());
    if count > LOOKAHEAD_REQUESTS_MAX {
        return Err(format!("lookahead: {count} requests: expected at most {LOOKAHEAD_REQUESTS_MAX}"));
    }
    let of_begun = begun.iter().flat_map(|begun| [begun.keys.len(), begun.first as usize]);
    let lists = || requests.iter().map(|request| request.keys.len()).chain(of_begun.clone());
    let keys: usize = requests.iter().map(|request| request.keys.len()).sum::<usize>()
        + begun.iter().map(|begun| begun.keys.len()).sum::<usize>();
    if keys > LOOKAHEAD_KEYS_MAX {
        return Err(format!("lookahead: {keys} keys: expected at most {LOOKAHEAD_KEYS_MAX}"));
    }
    match lists().find(|keys| !keys.is_multiple_of(ranks)) {
        Some(keys) => {
            Err(format!("lookahead: {keys} keys of {ranks} ranks: expected {ranks} keys for each block"))
        }
        None => Ok(()),
    }
}

impl Prefetch {
    /// Applies a checked hint to the requests of its session. Returns the number of parts that were ignored.
    pub(super) fn update(&mut self, cache: &mut Cache, cx: &Context, caller: Caller, hint: Lookahead) -> u32 {
        let Lookahead { iteration, requests, cancelled, ranks, .. } = hint;
        let classes = cache.rank_classes(caller.size_class, ranks);
        let session = caller.session;
        let hinted = self.sessions.entry(session).or_default();
        hinted.hints += 1;
        let number = hinted.hints;
        let mut ignored = 0;
        if iteration.is_zero() || iteration > ITERATION_MAX {
            self.counters.prefetch_ignored_times += 1;
            ignored += 1;
        } else {
            hinted.iteration.add(iteration);
        }
        for request in cancelled {
            if self.sessions.get(&session).is_some_and(|hinted| hinted.requests.contains_key(&request)) {
                self.counters.prefetch_cancelled_requests += 1;
                self.end_request(cache, session, request);
            }
        }
        for listed in requests {
            if !self.list(cache, session, listed, (&classes, number, cx)) {
                self.counters.prefetch_ignored_requests += 1;
                ignored += 1;
            }
        }
        self.leave_unlisted(cache, cx.now, (caller, number));
        ignored
    }

    /// Adds or updates a listed request; `false` if it is ignored.
    fn list(
        &mut self,
        cache: &mut Cache,
        session: SessionId,
        listed: LookaheadRequest,
        (classes, number, cx): (&RankClasses, u64, &Context),
    ) -> bool {
        let limits = cx.settings.prefetch;
        let LookaheadRequest { request, iterations, confidence, keys } = listed;
        let Some(hinted) = self.sessions.get_mut(&session) else { return false };
        let tracked = hinted.requests.len();
        let is_valid = iterations > 0 && (1..=CONFIDENCE_MAX).contains(&confidence);
        let known_keys = hinted.requests.get(&request).map_or(0, Wanted::keys);
        let has_room = keys.is_empty() || hinted.keys - known_keys + keys.len() <= limits.session_keys;
        match hinted.requests.get_mut(&request) {
            Some(known) if known.hint == number => return false,
            // It still waits, even though its entry is ignored.
            Some(known) if !is_valid || (!has_room && known.phase != Phase::Expired) => {
                known.hint = number;
                return false;
            }
            None if !is_valid || !has_room => return false,
            Some(known) if keys.is_empty() || known.phase == Phase::Expired => {
                (known.iterations, known.confidence, known.hint) = (iterations, confidence, number);
                if known.phase == Phase::Left {
                    known.phase = Phase::Listed;
                    let due = cx.now.after(limits.staged);
                    if let Some(before) = known.due.replace(due) {
                        self.timers.clear(before, (session, request));
                    }
                    self.timers.set(due, (session, request));
                }
                return true;
            }
            None if keys.is_empty() || tracked >= LOOKAHEAD_TRACKED_MAX => return false,
            Some(_) | None => {}
        }
        let mut wanted = Wanted::new(iterations, confidence, number);
        self.locate(cache, &mut wanted, keys, classes);
        // Sending keys again does not extend the time for which a request is listed or its blocks are staged.
        let known = self.sessions.get(&session).and_then(|hinted| hinted.requests.get(&request));
        let listed_until = known.filter(|known| known.phase == Phase::Listed).and_then(|known| known.due);
        // The blocks of the former keys that are still listed have another holder now.
        self.end_request(cache, session, request);
        let mut due = listed_until.unwrap_or(cx.now.after(limits.listed));
        if wanted.holds_any(&self.staged) {
            due = due.min(cx.now.after(limits.staged));
        }
        wanted.due = Some(due);
        self.timers.set(due, (session, request));
        let Some(hinted) = self.sessions.get_mut(&session) else { return false };
        hinted.keys += wanted.keys();
        hinted.requests.insert(request, wanted);
        true
    }

    /// Adds the blocks of these keys that are on devices or staged to a request.
    fn locate(&mut self, cache: &Cache, wanted: &mut Wanted, keys: Vec<BlockKey>, classes: &RankClasses) {
        for (key, class) in keys.into_iter().zip(classes.cycle()) {
            let copy = class.map(|class| (class, cache.ahead_copy(&key, class)));
            match copy {
                Some((class, AheadCopy::OnDevice(device, _))) => {
                    wanted.push(device, cache.size_class(class).slot_bytes, (key, class));
                }
                Some((class, AheadCopy::InDram | AheadCopy::Filling)) => {
                    let staged = self.staged.find(&key, class);
                    staged.into_iter().for_each(|id| self.staged.hold(id));
                    wanted.blocks.push(ListedBlock { key, class, staged });
                }
                None | Some((_, AheadCopy::Absent)) => {
                    self.counters.prefetch_unknown_keys += 1;
                    wanted.known = false;
                }
            }
        }
    }

    /// Handles the requests that the hint does not list: they have begun. Their staged blocks wait for the load,
    /// for a limited time.
    fn leave_unlisted(&mut self, cache: &mut Cache, now: Tick, (caller, number): (Caller, u64)) {
        let session = caller.session;
        let Some(hinted) = self.sessions.get_mut(&session) else { return };
        let grace = grace(hinted);
        let mut over = Vec::new();
        for (request, wanted) in hinted.requests.iter_mut().filter(|(_, wanted)| wanted.hint != number) {
            if wanted.phase == Phase::Left {
                continue;
            }
            let pending = wanted.pending_keys();
            if pending > 0 {
                self.counters.prefetch_missed_windows += 1;
                hinted.window.missed();
                hinted.keys -= pending;
                wanted.pending = Vec::new();
            }
            if !wanted.holds_any(&self.staged) {
                over.push(*request);
                continue;
            }
            wanted.phase = Phase::Left;
            if let Some(due) = wanted.due.replace(now.after(grace)) {
                self.timers.clear(due, (session, *request));
            }
            self.timers.set(now.after(grace), (session, *request));
        }
        for request in over {
            self.end_request(cache, session, request);
        }
    }
}

/// Time for which the blocks of a request that has begun wait for its load.
fn grace(hinted: &Hinted) -> Duration {
    let iteration = hinted.iteration.expected().unwrap_or_default();
    let window = u32::try_from(ITERATION_WINDOW).unwrap_or(1);
    iteration.saturating_mul(window).clamp(LOOKAHEAD_GRACE_MIN, LOOKAHEAD_GRACE_MAX)
}
