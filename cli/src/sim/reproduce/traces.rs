//! Traces of the cascade reproduction: the complete ones of a folder, or the samples in this program.

use std::fs::File;
use std::io::BufReader;
use std::num::NonZero;
use std::path::Path;

use anyhow::Context;
use lzma_rust2::XzReader;
use reprise_simulator::replay::{ReadOptions, TraceBuilder, read_lines};
use reprise_simulator::serving::reproduce::{NamedTrace, Traces};
use reprise_testkit::output::Audience;

use super::super::replay::{XZ_KIB_MAX, read_archive};

/// Folder next to a checkout that may have the complete traces.
const DEFAULT_FOLDER: &str = "../shared/data";

/// Files of the complete traces.
const CONVERSATION: &str = "conversation_trace.jsonl";
const AGENTIC: &str = "agentic_traces.tar.xz";

/// Samples for checkouts without the complete traces: the first 400 requests, and a few sessions.
const CONVERSATION_SAMPLE: &[u8] = include_bytes!("../../../../testkit/data/conversation_sample.jsonl");
const AGENTIC_SAMPLE: &[u8] = include_bytes!("../../../../testkit/data/agentic_sample.tar.xz");

/// Sessions of the archive that are replayed: those of docs/SIMULATOR.md.
const SESSIONS: NonZero<u32> = NonZero::new(120).expect("above zero");

/// Time within which sessions start at random, and the seed.
const SPREAD_MS: u64 = 4 * 3_600_000;
const SEED: u64 = 0;

/// Sources of the complete traces, for errors.
const REMEDY: &str = "get conversation_trace.jsonl from github.com/kvcache-ai/Mooncake (FAST25-release/traces) and put \
                      agentic sessions into agentic_traces.tar.xz (docs/SIMULATOR.md, Traces), or leave out --traces to \
                      replay the built-in samples";

/// Reads the traces of a folder; without one, those next to the checkout or the samples.
pub(super) fn read(folder: Option<&Path>, audience: Audience) -> anyhow::Result<Traces> {
    let default = Path::new(DEFAULT_FOLDER);
    match folder {
        Some(folder) => of_folder(folder, audience),
        None if [CONVERSATION, AGENTIC].iter().all(|name| default.join(name).exists()) => {
            of_folder(default, audience)
        }
        None => samples(audience),
    }
}

fn of_folder(folder: &Path, audience: Audience) -> anyhow::Result<Traces> {
    let open = |name: &str| {
        let path = folder.join(name);
        let file = File::open(&path).with_context(|| format!("cannot open {}: {REMEDY}", path.display()))?;
        anyhow::Ok(BufReader::new(file))
    };
    let (conversation, agentic) = (open(CONVERSATION)?, open(AGENTIC)?);
    let agentic_name = format!("{AGENTIC}, first {SESSIONS} sessions");
    of_readers((CONVERSATION, conversation), (&agentic_name, agentic), audience)
}

/// Returns the samples in this program.
pub(super) fn samples(audience: Audience) -> anyhow::Result<Traces> {
    let conversation = ("conversation_sample.jsonl (built in)", CONVERSATION_SAMPLE);
    of_readers(conversation, ("agentic_sample.tar.xz (built in)", AGENTIC_SAMPLE), audience)
}

fn of_readers(
    conversation: (&str, impl std::io::BufRead),
    agentic: (&str, impl std::io::Read),
    audience: Audience,
) -> anyhow::Result<Traces> {
    let (name, reader) = conversation;
    let mut builder = TraceBuilder::new(ReadOptions::default());
    read_lines(reader, &mut builder).with_context(|| name.to_owned())?;
    let conversation = NamedTrace { name: name.to_owned(), trace: builder.finish(name)? };
    let (name, reader) = agentic;
    let mut builder = TraceBuilder::new(ReadOptions::default());
    let sessions = XzReader::new_mem_limit(reader, true, XZ_KIB_MAX);
    read_archive(sessions, Some(SESSIONS), audience, &mut builder).with_context(|| name.to_owned())?;
    let trace = builder.finish(name)?.started_at_random(SPREAD_MS, SEED);
    Ok(Traces { conversation, agentic: NamedTrace { name: name.to_owned(), trace } })
}
