//! Files of traces: which format a file has, and its reader.

use std::fs::File;
use std::io::{BufRead, BufReader, Read, Seek, SeekFrom};
use std::num::NonZero;
use std::path::Path;

use anyhow::{Context, ensure};
use lzma_rust2::XzReader;
use reprise_simulator::replay::{ReadOptions, Trace, TraceBuilder, TraceRequest, read_lines, read_session};
use reprise_testkit::output::Audience;
use reprise_testkit::trace::recording::{self, Recording};

/// File of a trace, and how it is read.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Source<'a> {
    pub(crate) path: &'a Path,
    pub(crate) options: ReadOptions,
    /// Maximum number of sessions of an archive.
    pub(crate) sessions: Option<NonZero<u32>>,
}

/// First bytes of a file in the format xz.
const XZ_MAGIC: [u8; 6] = [0xfd, b'7', b'z', b'X', b'Z', 0];

/// Maximum memory for the dictionary of an archive: that of the highest level has 64 MiB.
pub(in crate::sim) const XZ_KIB_MAX: u32 = 256 << 10;

/// Maximum bytes of the first line by which a recording is recognised.
const FIRST_LINE_MAX: u64 = 1 << 20;

/// Reads a trace in any of the formats.
pub(crate) fn read(source: &Source<'_>, audience: Audience) -> anyhow::Result<Trace> {
    let Source { path, options, sessions: sessions_max } = *source;
    let name = path.display().to_string();
    let file = File::open(path).with_context(|| format!("cannot open the trace {name}"))?;
    let mut reader = BufReader::new(file);
    let mut builder = TraceBuilder::new(options);
    let start = reader.fill_buf().with_context(|| format!("cannot read {name}"))?;
    let has_extension = |wanted: &str| path.extension().is_some_and(|extension| extension == wanted);
    if start.starts_with(&XZ_MAGIC) {
        let sessions = XzReader::new_mem_limit(reader, true, XZ_KIB_MAX);
        read_archive(sessions, sessions_max, audience, &mut builder).with_context(|| name.clone())?;
    } else if has_extension("tar") {
        read_archive(reader, sessions_max, audience, &mut builder).with_context(|| name.clone())?;
    } else if has_extension("json") {
        read_session(&name, reader, &mut builder)?;
    } else if is_recording(&mut reader).with_context(|| format!("cannot read {name}"))? {
        read_recording(&name, reader, options.allow_gaps, &mut builder)?;
    } else {
        read_lines(reader, &mut builder).with_context(|| name.clone())?;
    }
    Ok(builder.finish(&name)?)
}

/// Adds the sessions of an archive, in its order. Other files are skipped.
pub(in crate::sim) fn read_archive(
    reader: impl Read,
    sessions: Option<NonZero<u32>>,
    audience: Audience,
    builder: &mut TraceBuilder,
) -> anyhow::Result<()> {
    let sessions_max = sessions.map_or(u32::MAX, NonZero::get);
    let progress = audience.progress(sessions.map_or(0, |sessions| u64::from(sessions.get())), "sessions");
    let damaged = "cannot read the archive: expected a tar archive of sessions, with xz or without";
    let mut archive = tar::Archive::new(reader);
    let mut sessions = 0;
    for entry in archive.entries().context(damaged)? {
        let entry = entry.context(damaged)?;
        let path = entry.path().context(damaged)?.into_owned();
        if !is_session(&path) {
            continue;
        }
        if sessions == sessions_max {
            break;
        }
        sessions += 1;
        read_session(&path.display().to_string(), entry, builder)?;
        progress.inc(1);
    }
    progress.finish_and_clear();
    ensure!(sessions > 0, "the archive has no sessions: expected files with the ending .json");
    Ok(())
}

fn is_session(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension == "json")
}

/// Whether a file is a recording; its reader is at its beginning again.
fn is_recording(reader: &mut BufReader<File>) -> std::io::Result<bool> {
    let mut first = Vec::new();
    reader.by_ref().take(FIRST_LINE_MAX).read_until(b'\n', &mut first)?;
    reader.seek(SeekFrom::Start(0))?;
    Ok(std::str::from_utf8(&first).is_ok_and(recording::is_recording))
}

fn read_recording(
    name: &str,
    reader: impl BufRead,
    allow_gaps: bool,
    builder: &mut TraceBuilder,
) -> anyhow::Result<()> {
    let recording = Recording::read(name, reader)?;
    let (dropped, parts) = (recording.dropped, recording.unplaced);
    let cut_off: Vec<&str> = recording.cut_off.iter().map(String::as_str).collect();
    ensure!(
        allow_gaps || (dropped == 0 && parts == 0 && cut_off.is_empty()),
        "{name}: the recording has gaps: {dropped} lost calls, {parts} parts of prompts without their begin, and no \
         last line of the nodes [{}]: record again, or pass --allow-gaps to replay the other requests",
        cut_off.join(", ")
    );
    for (number, request) in (1..).zip(&recording.requests) {
        let request = TraceRequest {
            at_ms: request.timestamp,
            session: None,
            input_tokens: request.input_length,
            output_tokens: request.output_length,
            block_tokens: Some(request.block_tokens),
            hash_ids: &request.hash_ids,
        };
        builder.add(&format!("{name}: request {number}"), &request)?;
    }
    Ok(())
}
