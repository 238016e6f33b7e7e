//! Which blocks a command selects, and the namespace and layout of its session.
//!
//! Keys are derived as engines derive them: the prefix hash `sha256_cbor` of vLLM over full blocks of tokens, then the
//! key over namespace, group and rank. Namespace and layout of a running engine are on the status page of its agent.
//! Without them, the command uses those of the reference engine, which `demo` and `replay` run.

use std::ops::Range;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail, ensure};
use clap::ArgGroup;
use reprise_client::BlockSelection;
use reprise_policy::key::KeyPart;
use reprise_policy::prefix_hash::{self, DEFAULT_SEED};
use reprise_policy::session::Ranks;
use reprise_policy::{BlockKey, Layout, NamespaceDigest, SessionId};
use reprise_testkit::engine;
use reprise_testkit::model::{self, SCALE_DEFAULT};
use reprise_testkit::trace::{TOKENS_PER_HASH_ID, Trace};

/// Maximum size of a file of tokens: a million tokens of seven digits.
const TOKENS_FILE_BYTES_MAX: u64 = 8 << 20;

/// Arguments that select blocks.
#[derive(Clone, Debug, clap::Args)]
#[command(group = ArgGroup::new("blocks").required(true))]
pub(crate) struct SelectArgs {
    /// Select the full blocks of a prompt with these token ids.
    #[arg(long, value_name = "ID,...", value_delimiter = ',', group = "blocks")]
    tokens: Vec<u32>,
    /// Select the full blocks of the prompt in this file of token ids.
    ///
    /// The ids are separated by commas or white space; a JSON array of numbers is valid too.
    #[arg(long, value_name = "FILE", group = "blocks")]
    tokens_file: Option<PathBuf>,
    /// Select the blocks of this line of the trace, from 1.
    #[arg(long, value_name = "N", group = "blocks")]
    trace_line: Option<usize>,
    /// Select the block with this key (32 hexadecimal digits); repeat for several.
    #[arg(long, value_name = "KEY", value_parser = block_key, group = "blocks")]
    key: Vec<BlockKey>,
    /// Select the blocks that the hints of this session list.
    ///
    /// The status page of the agent lists the open sessions.
    #[arg(long, value_name = "NUMBER", group = "blocks")]
    session: Option<u64>,
    /// Select all blocks of the namespace on the node.
    ///
    /// Refused if sessions of the tenant have saved or loaded blocks of the same layout in another namespace. `demote` and
    /// `delete` are also refused if the node found such blocks on a device when it started, or peers placed some there: a
    /// block names no namespace. Select these by tokens, keys or session.
    #[arg(long, group = "blocks")]
    all_blocks: bool,
    /// Use this namespace: 64 hexadecimal digits [default: that of `reprise replay`].
    #[arg(long, value_name = "DIGEST", value_parser = namespace, requires = "layout")]
    namespace: Option<NamespaceDigest>,
    /// Use this encoded layout: 32 hexadecimal digits [default: that of `reprise replay`].
    #[arg(long, value_name = "LAYOUT", value_parser = model::layout_from_hex, requires = "namespace")]
    layout: Option<Layout>,
    /// Divide the bytes of Llama-3-8B's KV cache by SCALE [default: 1024].
    ///
    /// Must be a power of two. Applies to the layout of `reprise replay`.
    #[arg(long, conflicts_with = "layout")]
    scale: Option<u32>,
    /// Begin the prefix chain with the hash of this text: the PYTHONHASHSEED of vLLM.
    #[arg(long, value_name = "TEXT", default_value = DEFAULT_SEED)]
    hash_seed: String,
    /// Select the parts of all ranks of the tensor-parallel group.
    #[arg(long)]
    all_ranks: bool,
    /// Read this trace for --trace-line [default: that of `reprise replay`].
    #[arg(long, value_name = "FILE", requires = "trace_line")]
    trace: Option<PathBuf>,
}

/// Selected blocks, and the session that may change them.
#[derive(Clone, Debug)]
pub(super) struct Selected {
    /// Without the salt of the tenant.
    pub(super) namespace: NamespaceDigest,
    pub(super) layout: Layout,
    pub(super) blocks: SelectedBlocks,
    pub(super) ranks: Ranks,
}

/// Blocks that a command changes.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum SelectedBlocks {
    /// Blocks that need no namespace.
    Fixed(BlockSelection),
    /// Blocks of a prompt, by prefix hash; their keys derive from the namespace of the session.
    Prompt { hashes: Vec<[u8; 32]>, shards: Range<u32> },
}

impl Selected {
    /// Returns the selection in the namespace of a session.
    pub(super) fn selection(&self, namespace: &NamespaceDigest) -> BlockSelection {
        match &self.blocks {
            SelectedBlocks::Fixed(selection) => selection.clone(),
            SelectedBlocks::Prompt { hashes, shards } => {
                let key =
                    |hash: &[u8; 32], shard| BlockKey::derive(namespace, hash, KeyPart { group: 0, shard });
                let of_block = |hash| shards.clone().map(move |shard| key(hash, shard));
                BlockSelection::Keys(hashes.iter().flat_map(of_block).collect())
            }
        }
    }

    /// Whether the blocks are selected by keys.
    pub(super) fn has_keys(&self) -> bool {
        !matches!(
            self.blocks,
            SelectedBlocks::Fixed(BlockSelection::Listed(_) | BlockSelection::Namespace { .. })
        )
    }
}

impl SelectArgs {
    /// Reads the selected blocks from the arguments.
    pub(super) fn resolve(&self) -> anyhow::Result<Selected> {
        let layout = match self.layout {
            Some(layout) => layout,
            None => model::llama_3_8b_scaled(self.scale.unwrap_or(SCALE_DEFAULT))?,
        };
        let namespace = self.namespace.unwrap_or_else(|| engine::namespace(&layout));
        let ranks = if self.all_ranks { Ranks::All } else { Ranks::Own };
        let blocks = if let Some(session) = self.session {
            SelectedBlocks::Fixed(BlockSelection::Listed(SessionId(session)))
        } else if self.all_blocks {
            SelectedBlocks::Fixed(BlockSelection::Namespace { from: 0 })
        } else if !self.key.is_empty() {
            SelectedBlocks::Fixed(BlockSelection::Keys(self.key.clone()))
        } else if let Some(line) = self.trace_line {
            ensure!(
                self.namespace.is_none() && !self.all_ranks,
                "--trace-line selects blocks of the reference engine, which has its own namespace and one rank: remove \
                 --namespace, --layout and --all-ranks, or select by --tokens"
            );
            SelectedBlocks::Prompt { hashes: trace_hashes(self.trace.as_deref(), line)?, shards: 0..1 }
        } else {
            let tokens = match &self.tokens_file {
                Some(path) => read_tokens(path)?,
                None => self.tokens.clone(),
            };
            self.prompt(&tokens, &layout)?
        };
        Ok(Selected { namespace, layout, blocks, ranks })
    }

    /// Selects a prompt's full blocks; of all ranks, those of a block follow each other.
    fn prompt(&self, tokens: &[u32], layout: &Layout) -> anyhow::Result<SelectedBlocks> {
        let spec = layout.spec();
        // The reference engine hashes blocks of the trace, which are longer than those of its layout.
        let per_block = match self.namespace {
            Some(_) => usize::from(spec.tokens_per_block),
            None => TOKENS_PER_HASH_ID,
        };
        ensure!(
            tokens.len() >= per_block,
            "{} tokens are less than one block of {per_block}: only full blocks are cached",
            tokens.len()
        );
        let shards = match self.all_ranks {
            true => 0..u32::from(spec.tp_size),
            false => u32::from(spec.tp_rank)..u32::from(spec.tp_rank) + 1,
        };
        let mut parent = prefix_hash::none_hash(&self.hash_seed);
        let hash = |block: &[u32]| {
            parent = prefix_hash::block_hash(&parent, block, &[]);
            parent
        };
        let hashes = tokens.chunks_exact(per_block).map(hash).collect();
        Ok(SelectedBlocks::Prompt { hashes, shards })
    }
}

fn trace_hashes(file: Option<&Path>, line: usize) -> anyhow::Result<Vec<[u8; 32]>> {
    let trace = Trace::open(file)?;
    let request = line.checked_sub(1).and_then(|at| trace.requests.get(at));
    let Some(request) = request else {
        bail!("line {line} does not exist: {} has lines 1 to {}", trace.name, trace.requests.len());
    };
    let hashes = engine::chain_hashes(request.full_blocks());
    ensure!(!hashes.is_empty(), "the prompt of line {line} has no full block");
    Ok(hashes)
}

/// Reads token ids from a file.
fn read_tokens(path: &Path) -> anyhow::Result<Vec<u32>> {
    let metadata = std::fs::metadata(path).with_context(|| format!("cannot read {}", path.display()))?;
    ensure!(
        metadata.is_file() && metadata.len() <= TOKENS_FILE_BYTES_MAX,
        "{} is not a file of at most {TOKENS_FILE_BYTES_MAX} bytes",
        path.display()
    );
    let text = std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    parse_tokens(&text).with_context(|| format!("in {}", path.display()))
}

fn parse_tokens(text: &str) -> anyhow::Result<Vec<u32>> {
    let text = text.trim();
    let inner = text.strip_prefix('[').and_then(|text| text.strip_suffix(']')).unwrap_or(text);
    let ids = inner.split(|c: char| c == ',' || c.is_whitespace()).filter(|id| !id.is_empty());
    let parse = |id: &str| {
        id.parse::<u32>().with_context(|| format!("invalid token id \"{id}\": expected a number below 2^32"))
    };
    ids.map(parse).collect()
}

fn block_key(text: &str) -> Result<BlockKey, String> {
    BlockKey::from_hex(text).ok_or_else(|| "expected a key of 32 hexadecimal digits".to_owned())
}

fn namespace(text: &str) -> Result<NamespaceDigest, String> {
    let halves = text.is_ascii().then(|| text.split_at_checked(32)).flatten();
    let parts = halves.and_then(|(high, low)| Some((BlockKey::from_hex(high)?, BlockKey::from_hex(low)?)));
    let (BlockKey(high), BlockKey(low)) =
        parts.ok_or_else(|| "expected a namespace of 64 hexadecimal digits".to_owned())?;
    let mut digest = [0; 32];
    digest[..16].copy_from_slice(&high);
    digest[16..].copy_from_slice(&low);
    Ok(NamespaceDigest(digest))
}

#[cfg(test)]
mod tests {
    use clap::Parser;
    use reprise_policy::LayoutSpec;

    use super::*;

    #[derive(Debug, Parser)]
    struct Command {
        #[command(flatten)]
        select: SelectArgs,
    }

    fn parse(args: &[&str]) -> Result<SelectArgs, clap::Error> {
        let parsed = Command::try_parse_from([&["x"], args].concat());
        parsed.map(|command| command.select)
    }

    fn resolve(args: &[&str]) -> anyhow::Result<Selected> {
        parse(args).expect("parses").resolve()
    }

    fn keys(selected: &Selected) -> Vec<BlockKey> {
        match selected.selection(&selected.namespace) {
            BlockSelection::Keys(keys) => keys,
            other => panic!("expected keys, got {other:?}"),
        }
    }

    #[test]
    fn tokens_give_the_keys_of_full_blocks_for_each_rank() {
        let layout = LayoutSpec { tp_size: 2, tp_rank: 1, ..LayoutSpec::LLAMA_3_8B };
        let layout = layout.validate().expect("valid");
        let (hex, namespace) = (model::hex(&layout.encode()), "77".repeat(32));
        let tokens: Vec<u32> = (0..40).collect();
        let list = tokens.iter().map(u32::to_string).collect::<Vec<_>>().join(",");
        let common = ["--tokens", &list, "--namespace", &namespace, "--layout", &hex];
        let own = resolve(&common).expect("derives");
        let digest = NamespaceDigest([0x77; 32]);
        assert_eq!((own.namespace, own.ranks), (digest, Ranks::Own));
        let seed = prefix_hash::none_hash(DEFAULT_SEED);
        let first = prefix_hash::block_hash(&seed, &tokens[..16], &[]);
        let second = prefix_hash::block_hash(&first, &tokens[16..32], &[]);
        let key = |hash: &[u8; 32], shard| BlockKey::derive(&digest, hash, KeyPart { group: 0, shard });
        assert_eq!(keys(&own), [key(&first, 1), key(&second, 1)], "the last 8 tokens do not fill a block");
        let all = resolve(&[&common[..], &["--all-ranks"]].concat()).expect("derives");
        assert_eq!(keys(&all), [key(&first, 0), key(&first, 1), key(&second, 0), key(&second, 1)]);
        let seeded = resolve(&[&common[..], &["--hash-seed", "0"]].concat()).expect("derives");
        assert_ne!(keys(&seeded), keys(&own));
    }

    #[test]
    fn invalid_selections_are_refused_with_the_remedy() {
        for args in [
            &[][..],
            &["--tokens", "1", "--session", "2"],
            &["--all-blocks", "--namespace", &"7".repeat(64)],
            &["--key", "xyz"],
            &["--tokens", "1,x"],
            &["--all-blocks", "--namespace", "77", "--layout", "00"],
        ] {
            assert!(parse(args).is_err(), "{args:?}");
        }
        let error = resolve(&["--tokens", "1,2"]).expect_err("too few").to_string();
        assert!(error.contains("2 tokens are less than one block"), "{error}");
        let error = resolve(&["--trace-line", "0"]).expect_err("no line").to_string();
        assert!(error.contains("line 0 does not exist"), "{error}");
        let error = resolve(&["--trace-line", "1", "--all-ranks"]).expect_err("ranks").to_string();
        assert!(error.contains("reference engine"), "{error}");
        assert!(resolve(&["--tokens-file", "/nonexistent"]).is_err());
    }

    #[test]
    fn token_files_hold_lists_or_json_arrays() {
        for text in ["1,2\n3", "[1, 2, 3]\n", " 1 2\t3 "] {
            assert_eq!(parse_tokens(text).expect(text), [1, 2, 3]);
        }
        for text in ["1,-2", "[1,[2]]", "{\"a\":1}", "4294967296"] {
            let error = parse_tokens(text).expect_err(text).to_string();
            assert!(error.contains("invalid token id"), "{error}");
        }
    }

    #[test]
    fn session_and_namespace_select_without_keys() {
        let selected = resolve(&["--session", "9"]).expect("resolves");
        assert_eq!(selected.blocks, SelectedBlocks::Fixed(BlockSelection::Listed(SessionId(9))));
        let selected = resolve(&["--all-blocks"]).expect("resolves");
        assert_eq!(selected.blocks, SelectedBlocks::Fixed(BlockSelection::Namespace { from: 0 }));
        assert_eq!(selected.namespace, engine::namespace(&selected.layout));
    }
}
