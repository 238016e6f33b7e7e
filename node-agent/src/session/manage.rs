//! Commands on blocks, as messages of the session protocol.

use std::time::Duration;

use reprise_agent_core::effect::{BlockCounts, BlockReport, RetentionUsage};
use reprise_agent_core::event::{BlockAction, BlockCommand, BlockSelection, Ranks};
use reprise_policy::SessionId;
use reprise_proto::local;

use super::decode::unpack;

/// Decodes a command.
///
/// # Errors
/// The invalid part, and the expected values.
pub(super) fn decode(command: local::ManageBlocks) -> Result<BlockCommand, String> {
    use local::manage_blocks::Selection;
    let local::ManageBlocks { action, ttl_us, all_ranks, selection } = command;
    let ttl = Duration::from_micros(ttl_us);
    let action = match local::BlockAction::try_from(action) {
        Ok(local::BlockAction::Pin) => BlockAction::Pin { ttl },
        Ok(local::BlockAction::Unpin) => BlockAction::Unpin,
        Ok(local::BlockAction::Prefetch) => BlockAction::Prefetch,
        Ok(local::BlockAction::Demote) => BlockAction::Demote,
        Ok(local::BlockAction::Delete) => BlockAction::Delete,
        Ok(local::BlockAction::Unspecified) | Err(_) => {
            return Err(format!("manage blocks: invalid action {action}: expected 1 to 5"));
        }
    };
    if ttl_us > 0 && !matches!(action, BlockAction::Pin { .. }) {
        return Err("manage blocks: a time is only allowed for a pin".to_owned());
    }
    let selection = match selection {
        Some(Selection::Keys(keys)) => BlockSelection::Keys(unpack("manage blocks: keys", &keys)?),
        Some(Selection::Listed(session)) => BlockSelection::Listed(SessionId(session)),
        Some(Selection::NamespaceFrom(from)) => BlockSelection::Namespace { from },
        None => return Err("manage blocks: no selection: expected keys, a session or a namespace".to_owned()),
    };
    Ok(BlockCommand { action, selection, ranks: if all_ranks { Ranks::All } else { Ranks::Own } })
}

/// Encodes the answer to a command.
pub(super) fn encode(report: BlockReport) -> local::BlocksManaged {
    let BlockReport { counts, next, retention } = report;
    let BlockCounts { affected, unchanged, absent, over_limit, in_use, pinned, bytes } = counts;
    let RetentionUsage { blocks, blocks_max, dram_bytes, dram_bytes_max, nvme_bytes, nvme_bytes_max } =
        retention;
    local::BlocksManaged {
        affected,
        unchanged,
        absent,
        over_limit,
        in_use,
        pinned,
        bytes,
        next: next.unwrap_or(0),
        retention: Some(local::RetentionUsage {
            blocks,
            blocks_max,
            dram_bytes,
            dram_bytes_max,
            nvme_bytes,
            nvme_bytes_max,
        }),
    }
}

#[cfg(test)]
mod tests {
    use local::manage_blocks::Selection;

    use super::*;

    #[test]
    fn invalid_parts_are_refused_with_the_remedy() {
        let valid = local::ManageBlocks {
            action: local::BlockAction::Demote as i32,
            selection: Some(Selection::Listed(1)),
            ..local::ManageBlocks::default()
        };
        assert!(decode(valid.clone()).is_ok());
        for (invalid, words) in [
            (local::ManageBlocks { action: 0, ..valid.clone() }, "expected 1 to 5"),
            (local::ManageBlocks { action: 9, ..valid.clone() }, "expected 1 to 5"),
            (local::ManageBlocks { ttl_us: 1, ..valid.clone() }, "only allowed for a pin"),
            (local::ManageBlocks { selection: None, ..valid.clone() }, "no selection"),
            (
                local::ManageBlocks { selection: Some(Selection::Keys(vec![0; 17].into())), ..valid },
                "16-byte keys",
            ),
        ] {
            let error = decode(invalid).expect_err(words);
            assert!(error.contains(words), "{error}");
        }
    }
}
