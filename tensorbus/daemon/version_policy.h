#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "tensorbus/daemon/model.h"

// Decisions about versions, as functions over values.
namespace tensorbus::daemon {

/// What a replica's wish comes to right now.
struct Choice {
  enum class Kind {
    kWait,     ///< nothing fits yet
    kAlready,  ///< the replica serves it
    kOpen,     ///< open a session for `version`
    kFail,     ///< can never be fulfilled: `status`
  };
  Kind kind = Kind::kWait;
  Version version;
  Status status;
};

/// Chooses for a replica of `channel` that serves `live` (untrusted when `dirty`).
///   latest  the newest readable version, or the one rolled back to
///   next    a readable version newer than `live`, or the one rolled back to if it differs from it
///   pinned  exactly `wanted`; fails with kNotFound once it can never be had
Choice ChooseVersion(const Channel& channel, Selector selector, Version wanted, Version live,
                     bool dirty);

/// Whether memory of a version that somebody asked back may be given.
enum class Release {
  kHold,   ///< somebody still needs it
  kClose,  ///< running sessions may end, no new one starts
  kGrant,
};

/// `running_sessions` are those that read the version.
Release DecideRelease(const Channel& channel, const VersionState& version,
                      std::size_t running_sessions);

/// Who keeps a version's memory from being given back, for people: ranks that have not published,
/// replicas that have not got it. Empty when only running sessions do.
std::vector<std::string> HoldersOf(const Channel& channel, const VersionState& version);

/// Snapshots that need not be kept any longer, oldest first. The newest and the one rolled back to
/// always stay.
std::vector<Version> SnapshotsToDrop(const Channel& channel);

/// Whether a version may have this number: the greatest has no successor.
///
/// Errors: kInvalidArgument/kMalformed, saying who `did` what with it.
Status CheckNumber(const std::string& who, std::string_view did, Version version);

/// Whether a producer rank may publish `version` now.
///
/// Errors: kFailedPrecondition with kStaleVersion (a number that is not new), kMalformed (policy
/// unlike other ranks'), kWriteDuringPublish (a session still reads what this rank published
/// before); kResourceExhausted/kBusy.
Status CheckPublish(const Channel& channel, const RankState& rank, const VersionState& wish,
                    bool previous_is_read);

/// Whether what a producer rank says it still holds can count as published by it again.
///
/// Errors: kInvalidArgument/kMalformed (a number it never published, policy unlike other ranks');
/// kResourceExhausted/kBusy.
Status CheckHeld(const Channel& channel, const RankState& rank, const VersionState& held);

/// Versions that never become readable: a rank that is there published them, or newer ones, and
/// holds them no more.
std::vector<Version> LostVersions(const Channel& channel);

/// "7, 8" or "none": readable versions, for messages.
std::string KeptVersions(const Channel& channel);

}  // namespace tensorbus::daemon
