#include "tensorbus/transport/tcp_auth.h"

#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>
#include <openssl/rand.h>

#include "tensorbus/base/byte_io.h"

namespace tensorbus::transport::tcp {

namespace {

ByteWriter MessageOf(std::string_view what, const Nonce& target, const Nonce& source) {
  ByteWriter message;
  message.PutBytes(target);
  message.PutBytes(source);
  message.Put(kTcpProtocolVersion);
  message.PutString(what);
  return message;
}

Mac MakeMac(std::string_view secret, const ByteWriter& message) {
  Mac mac = {};
  unsigned size = 0;
  const unsigned char* made =
      HMAC(EVP_sha256(), secret.data(), static_cast<int>(secret.size()),
           reinterpret_cast<const unsigned char*>(message.bytes().data()), message.size(),
           reinterpret_cast<unsigned char*>(mac.data()), &size);
  TB_CHECK(made != nullptr && size == mac.size());
  return mac;
}

}  // namespace

Result<Nonce> MakeNonce() {
  Nonce nonce = {};
  if (RAND_bytes(reinterpret_cast<unsigned char*>(nonce.data()), static_cast<int>(nonce.size())) !=
      1) {
    return Status(Code::kUnavailable, "no random bytes for the handshake");
  }
  return nonce;
}

Mac SourceMac(std::string_view token, const Nonce& target, const Nonce& source) {
  return MakeMac(token, MessageOf("tensorbus tcp source", target, source));
}

Mac TargetMac(std::string_view token, const Nonce& target, const Nonce& source) {
  return MakeMac(token, MessageOf("tensorbus tcp target", target, source));
}

Mac PullMac(const Capability& capability, const Nonce& target, const Nonce& source,
            const RouteKey& key) {
  ByteWriter message = MessageOf("tensorbus tcp pull", target, source);
  message.Put(key.session.value);
  message.Put(key.source_rank);
  message.Put(key.target_rank);
  return MakeMac(capability.secret(), message);
}

bool SameMac(const Mac& a, const Mac& b) {
  return CRYPTO_memcmp(a.data(), b.data(), a.size()) == 0;
}

}  // namespace tensorbus::transport::tcp
