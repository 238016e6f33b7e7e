//! Traces of what engines ask of agents: block keys, sizes and times, without text.
//!
//! An agent records the calls of its sessions as lines of JSON. A recording begins with a line
//! [`Line::Start`] for each agent and ends with a line [`Line::End`] for each. [`Requests`] turns the calls into
//! requests, which can be replayed.
//!
//! Keys identify prefixes: equal keys mean equal tokens up to the end of the block. [`Names`] replaces keys and
//! names by numbers, so that a trace can be given away: a key can be guessed from a known prompt, its number cannot.

use std::collections::{HashMap, HashSet};

use serde::{Deserialize, Serialize};

use crate::BlockKey;

/// Version of the lines. A reader refuses other versions.
pub const VERSION: u32 = 1;

/// A line of a recording.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "line", rename_all = "snake_case", deny_unknown_fields)]
pub enum Line {
    /// First line of an agent.
    Start {
        /// [`VERSION`].
        version: u32,
        /// Name of the agent's node.
        node: String,
    },
    /// A call of an engine.
    Call(Call),
    /// Last line of an agent. Without it, the recording was cut off.
    End {
        /// Name of the agent's node.
        node: String,
        /// Number of recorded calls.
        calls: u64,
        /// Number of calls that are missing, because the reader was slower than the engines.
        dropped: u64,
    },
}

/// Kind of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Operation {
    /// The engine asked how many leading blocks are available: a request has arrived.
    Match,
    /// The engine loaded blocks.
    Load,
    /// The engine saved blocks.
    Save,
}

/// A call of an engine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Call {
    /// Kind of the call.
    pub operation: Operation,
    /// Time of the receipt in microseconds since the Unix epoch, by the clock of the node.
    pub micros: u64,
    /// Name of the node.
    pub node: String,
    /// Number of the session at its agent.
    pub session: u64,
    /// Tenant of the session.
    pub tenant: String,
    /// Tokens of a block.
    pub block_tokens: u64,
    /// Payload of a block in bytes: of one rank, where blocks are divided among ranks.
    pub block_bytes: u64,
    /// Number of blocks before the first key in its chain; absent if the engine does not report it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub position: Option<u32>,
    /// Block before the first key in its chain, where a save names it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parent: Option<BlockKey>,
    /// Keys in the order of their chain; of the first rank, where blocks are divided among ranks.
    pub keys: Vec<BlockKey>,
}

/// A request of an engine, as calls show it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    /// Arrival in microseconds since the Unix epoch.
    pub micros: u64,
    /// Tokens of a block.
    pub block_tokens: u64,
    /// Keys of the prompt's full blocks.
    pub prompt: Vec<BlockKey>,
    /// Number of full blocks that the engine saved behind the prompt.
    pub output_blocks: u64,
}

/// Engines ask again about a waiting request. The same question within this time is not a new request, unless the prompt
/// was loaded or saved in between.
const ASKED_AGAIN_MICROS: u64 = 10_000_000;

/// Turns the calls of a recording into requests. Calls of one session must come in their order.
///
/// A match from the first block of a chain is a request. A match with an unknown position is not: it looks up blocks that
/// are about to be moved.
#[derive(Debug, Default)]
pub struct Requests {
    requests: Vec<Request>,
    /// By node and session: index of the request that the next part of a long match continues.
    last: HashMap<(String, u64), usize>,
    /// By last key: a request that waits, its session, and the time at which the engine last asked about it.
    asked: HashMap<BlockKey, Asked>,
    /// Blocks of prompts, and outputs that are counted.
    known: HashSet<BlockKey>,
    /// Index of the latest request whose blocks end with this key. Engines match and save in different sessions.
    by_end: HashMap<BlockKey, usize>,
    unplaced: u64,
}

#[derive(Debug)]
struct Asked {
    at: usize,
    session: (String, u64),
    micros: u64,
}

impl Requests {
    /// Adds a call of an engine.
    pub fn add(&mut self, call: &Call) {
        if call.operation != Operation::Match {
            call.keys.iter().for_each(|key| drop(self.asked.remove(key)));
        }
        match call.operation {
            Operation::Match => self.add_match(call),
            Operation::Save => self.add_save(call),
            Operation::Load => {}
        }
    }

    /// Returns the number of matches that belong to no request in the recording: their position is unknown, or the
    /// begin of the prompt is missing.
    pub fn unplaced(&self) -> u64 {
        self.unplaced
    }

    /// Returns the requests in the order of their arrival.
    pub fn into_requests(mut self) -> Vec<Request> {
        self.requests.sort_by_key(|request| request.micros);
        self.requests
    }

    fn add_match(&mut self, call: &Call) {
        let (Some(first), Some(end)) = (call.keys.first(), call.keys.last()) else { return };
        let session = (call.node.clone(), call.session);
        let at = match call.position {
            Some(0) => self.request(call, *end),
            Some(position) => {
                let continues = |at: &&usize| self.requests[**at].prompt.len() == position as usize;
                let Some(&at) = self.last.get(&session).filter(continues) else {
                    // An engine that asks again begins with the first block that it lacks.
                    self.unplaced += u64::from(!self.known.contains(first));
                    return;
                };
                self.requests[at].prompt.extend_from_slice(&call.keys);
                at
            }
            None => {
                self.unplaced += 1;
                return;
            }
        };
        self.known.extend(&call.keys);
        self.last.insert(session, at);
        self.by_end.insert(*end, at);
    }

    /// Returns the index of the request of a match from the first block, which may be an earlier one.
    fn request(&mut self, call: &Call, end: BlockKey) -> usize {
        let session = (call.node.clone(), call.session);
        let again = self.asked.get(&end).filter(|asked| {
            asked.session == session && call.micros.saturating_sub(asked.micros) < ASKED_AGAIN_MICROS
        });
        let at = again.map_or(self.requests.len(), |asked| asked.at);
        if at == self.requests.len() {
            self.requests.push(Request {
                micros: call.micros,
                block_tokens: call.block_tokens,
                prompt: call.keys.clone(),
                output_blocks: 0,
            });
        }
        self.asked.insert(end, Asked { at, session, micros: call.micros });
        at
    }

    fn add_save(&mut self, call: &Call) {
        let new = call.keys.iter().rposition(|key| self.known.contains(key)).map_or(0, |at| at + 1);
        let before = if new > 0 { call.keys.get(new - 1) } else { call.parent.as_ref() };
        let Some(&at) = before.and_then(|key| self.by_end.get(key)) else { return };
        let output = &call.keys[new..];
        let Some(end) = output.last() else { return };
        self.requests[at].output_blocks += output.len() as u64;
        self.known.extend(output);
        self.by_end.insert(*end, at);
    }
}

/// Replaces keys, tenants and nodes by numbers in the order of their appearance, and times by times since the
/// first call.
#[derive(Debug, Default)]
pub struct Names {
    keys: HashMap<BlockKey, u128>,
    tenants: HashMap<String, String>,
    nodes: HashMap<String, String>,
    first_micros: Option<u64>,
}

impl Names {
    /// Returns the line without names.
    pub fn replace(&mut self, line: Line) -> Line {
        match line {
            Line::Start { version, node } => Line::Start { version, node: self.node(node) },
            Line::End { node, calls, dropped } => Line::End { node: self.node(node), calls, dropped },
            Line::Call(call) => Line::Call(self.replace_call(call)),
        }
    }

    fn replace_call(&mut self, call: Call) -> Call {
        let first = *self.first_micros.get_or_insert(call.micros);
        Call {
            micros: call.micros.saturating_sub(first),
            node: self.node(call.node),
            tenant: numbered(&mut self.tenants, "tenant", call.tenant),
            parent: call.parent.map(|key| self.key(key)),
            keys: call.keys.into_iter().map(|key| self.key(key)).collect(),
            ..call
        }
    }

    fn node(&mut self, name: String) -> String {
        numbered(&mut self.nodes, "node", name)
    }

    fn key(&mut self, key: BlockKey) -> BlockKey {
        let next = self.keys.len() as u128 + 1;
        BlockKey(self.keys.entry(key).or_insert(next).to_be_bytes())
    }
}

fn numbered(names: &mut HashMap<String, String>, prefix: &str, name: String) -> String {
    let next = names.len() + 1;
    names.entry(name).or_insert_with(|| format!("{prefix}-{next}")).clone()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(number: u8) -> BlockKey {
        BlockKey([number; BlockKey::SIZE])
    }

    fn call(operation: Operation, micros: u64, keys: &[u8]) -> Call {
        Call {
            operation,
            micros,
            node: "a".to_owned(),
            session: 1,
            tenant: "team".to_owned(),
            block_tokens: 16,
            block_bytes: 4096,
            position: None,
            parent: None,
            keys: keys.iter().map(|number| key(*number)).collect(),
        }
    }

    fn requests(calls: &[Call]) -> (Vec<Request>, u64) {
        let mut requests = Requests::default();
        calls.iter().for_each(|call| requests.add(call));
        let unplaced = requests.unplaced();
        (requests.into_requests(), unplaced)
    }

    #[test]
    fn lines_survive_json() {
        let save = Call { parent: Some(key(9)), position: Some(3), ..call(Operation::Save, 5, &[1, 2]) };
        let lines = [
            Line::Start { version: VERSION, node: "a".to_owned() },
            Line::Call(save),
            Line::End { node: "a".to_owned(), calls: 1, dropped: 0 },
        ];
        for line in lines {
            let text = serde_json::to_string(&line).expect("encodes");
            assert_eq!(serde_json::from_str::<Line>(&text).expect("decodes"), line, "{text}");
        }
        let wrong = r#"{"line":"call","keys":["1"]}"#;
        assert!(serde_json::from_str::<Line>(wrong).is_err());
    }

    fn part(micros: u64, position: Option<u32>, keys: &[u8]) -> Call {
        Call { position, ..call(Operation::Match, micros, keys) }
    }

    fn save(parent: Option<u8>, keys: &[u8]) -> Call {
        Call { parent: parent.map(key), ..call(Operation::Save, 2, keys) }
    }

    #[test]
    fn only_matches_from_the_first_block_are_requests() {
        let calls = [
            part(30, Some(0), &[1, 2]),
            call(Operation::Load, 31, &[1]),
            part(32, None, &[1, 2]),
            part(20, Some(0), &[1, 3]),
        ];
        let (requests, unplaced) = requests(&calls);
        assert_eq!(unplaced, 1);
        assert_eq!(requests.iter().map(|request| request.micros).collect::<Vec<_>>(), [20, 30]);
        assert_eq!(requests[1].prompt, [key(1), key(2)]);
    }

    #[test]
    fn parts_of_a_match_are_one_request_if_its_begin_is_recorded() {
        let (found, unplaced) = requests(&[part(1, Some(0), &[1, 2]), part(1, Some(2), &[3])]);
        assert_eq!((found.len(), unplaced), (1, 0));
        assert_eq!(found[0].prompt, [key(1), key(2), key(3)]);
        let (found, unplaced) = requests(&[part(1, Some(0), &[1]), part(1, Some(2), &[3])]);
        assert_eq!((found.len(), unplaced), (1, 1));
        // The second request has the same long prompt.
        let twice = [part(1, Some(0), &[1]), part(1, Some(1), &[2])];
        let later = twice.clone().map(|call| Call { micros: 2 * ASKED_AGAIN_MICROS, ..call });
        let (found, _) = requests(&[twice, later].concat());
        assert_eq!((found.len(), found[1].prompt.len()), (2, 2));
    }

    #[test]
    fn a_question_that_is_repeated_soon_is_one_request() {
        let step = ASKED_AGAIN_MICROS - 1;
        let again = [part(1, Some(0), &[1, 2]), part(step, Some(0), &[1, 2]), part(step + 1, Some(1), &[2])];
        let (found, unplaced) = requests(&again);
        assert_eq!((found.len(), unplaced), (1, 0));
        let (found, _) = requests(&[part(1, Some(0), &[1, 2]), part(2 + step, Some(0), &[1, 2])]);
        assert_eq!(found.len(), 2);
        let served =
            [part(1, Some(0), &[1, 2]), call(Operation::Load, 2, &[1, 2]), part(3, Some(0), &[1, 2])];
        assert_eq!(requests(&served).0.len(), 2);
    }

    #[test]
    fn saves_behind_the_prompt_are_its_output() {
        let calls = [
            part(1, Some(0), &[1, 2]),
            save(Some(1), &[2, 3]),
            save(Some(3), &[4, 5]),
            save(Some(3), &[4, 5]),
            save(Some(8), &[9]),
        ];
        let (found, _) = requests(&calls);
        assert_eq!((found.len(), found[0].output_blocks), (1, 3));
        let (found, _) = requests(&[part(1, Some(0), &[1, 2]), save(None, &[1, 2])]);
        assert_eq!(found[0].output_blocks, 0, "the prompt is not output");
    }

    #[test]
    fn a_longer_prompt_is_not_the_output_of_its_beginning() {
        let calls = [
            part(1, Some(0), &[1, 2]),
            save(None, &[1, 2]),
            part(2, Some(0), &[1, 2, 3, 4]),
            save(Some(2), &[3]),
            save(Some(3), &[4, 5]),
        ];
        let (found, _) = requests(&calls);
        assert_eq!(found.iter().map(|request| request.output_blocks).collect::<Vec<_>>(), [0, 1]);
    }

    #[test]
    fn names_keep_equality_and_order_only() {
        let mut names = Names::default();
        let line =
            |number| Line::Call(Call { parent: Some(key(4)), ..call(Operation::Save, 70, &[number, 9]) });
        let Line::Call(first) = names.replace(line(200)) else { panic!("a call stays a call") };
        let Line::Call(second) = names.replace(line(201)) else { panic!("a call stays a call") };
        assert_eq!((first.micros, first.node.as_str(), first.tenant.as_str()), (0, "node-1", "tenant-1"));
        assert_eq!(first.parent, second.parent);
        assert_ne!(first.keys[0], second.keys[0]);
        assert_eq!(first.keys[1], second.keys[1]);
        let text = serde_json::to_string(&Line::Call(first)).expect("encodes");
        assert!(!text.contains(&key(200).to_string()) && !text.contains("team"), "{text}");
    }
}
