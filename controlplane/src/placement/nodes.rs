//! `SetNode`: sets the mode of a node in the store, on any member.

use reprise_policy::NodeMode;
use reprise_proto::controlplane::{self as wire, SetNodeReply, SetNodeRequest};
use tonic::Status;

use super::PlacementService;
use crate::cluster::node_selection::wire_mode;
use crate::membership::status_of;
use crate::modes;

/// Maximum number of node names in an error.
const NAMES_SHOWN: usize = 16;

/// Handles a `SetNode` request.
pub(super) async fn set(service: &PlacementService, request: SetNodeRequest) -> Result<SetNodeReply, Status> {
    let SetNodeRequest { name, mode } = request;
    let mode = match wire::NodeMode::try_from(mode) {
        Ok(wire::NodeMode::Active) => NodeMode::Active,
        Ok(wire::NodeMode::Cordoned) => NodeMode::Cordoned,
        Ok(wire::NodeMode::Draining) => NodeMode::Draining,
        Ok(wire::NodeMode::Unspecified) | Err(_) => {
            return Err(Status::invalid_argument(format!(
                "invalid mode {mode}: expected ACTIVE, CORDONED or DRAINING"
            )));
        }
    };
    let names = service.cluster.names();
    if !names.contains(&name) {
        return Err(unknown_node(&name, names));
    }
    let (before, set) = modes::set(service.store.as_ref(), &service.identity, &name, mode)
        .await
        .map_err(|error| status_of(&error))?;
    service.cluster.set_mode(&name, set);
    Ok(SetNodeReply { before: wire_mode(before).into() })
}

/// Error for an unknown node name; lists the known ones.
pub(crate) fn unknown_node(name: &str, mut names: Vec<String>) -> Status {
    let name = name.chars().take(64).collect::<String>().escape_default().to_string();
    names.sort_unstable();
    let more = if names.len() > NAMES_SHOWN { ", ..." } else { "" };
    names.truncate(NAMES_SHOWN);
    Status::not_found(match names.as_slice() {
        [] => format!("unknown node '{name}': no node has registered yet"),
        names => format!("unknown node '{name}': known nodes are {}{more}", names.join(", ")),
    })
}
